"""T5X's contributed parts."""
