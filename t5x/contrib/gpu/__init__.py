"""NVIDIA's edition of T5X."""
