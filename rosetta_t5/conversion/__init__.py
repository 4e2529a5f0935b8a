"""`rosetta-t5 convert`, and its verification against reference implementations."""
