"""NVIDIA's scripts, under the path that T5X had for them before contrib."""
