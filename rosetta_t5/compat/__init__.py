"""What exists only because T5X had it: its older checkpointers, protocols and helper functions."""
