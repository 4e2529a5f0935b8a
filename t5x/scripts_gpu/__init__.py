"""NVIDIA's scripts, at the path that T5X used before contrib."""
