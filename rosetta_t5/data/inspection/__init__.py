"""`rosetta-t5 inspect`: a task's batches as text, and what is wrong with them."""
