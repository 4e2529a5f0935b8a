"""NVIDIA's scripts, under T5X's path."""
