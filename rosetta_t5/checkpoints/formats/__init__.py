"""The layouts of checkpoints on disk: each is read as {T5X's name: array} without reading values."""
