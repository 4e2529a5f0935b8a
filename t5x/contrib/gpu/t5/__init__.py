"""The T5 networks of NVIDIA's GPU edition of T5X."""
