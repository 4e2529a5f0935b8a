"""T5X's contributed packages."""
