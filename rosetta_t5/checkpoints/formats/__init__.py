"""The layouts of checkpoints on disk. Each module reads one as {T5X's name: lazy array}."""
