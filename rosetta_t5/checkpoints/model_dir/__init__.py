"""MODEL_DIR: its lock, its checkpoint folders, and which checkpoints are kept."""
