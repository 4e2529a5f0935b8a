"""MODEL_DIR: its lock, its checkpoint folders, and which of them are kept."""
