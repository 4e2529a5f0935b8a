"""linen modules: T5, scalable T5, decoders; `layers` is shared by all of them."""
