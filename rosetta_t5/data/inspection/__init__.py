"""`rosetta-t5 inspect`: shows a task's batches as text, and checks its data."""
