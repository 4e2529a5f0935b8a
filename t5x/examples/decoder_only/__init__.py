"""T5X's decoder-only example network."""
