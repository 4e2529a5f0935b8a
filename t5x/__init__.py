"""T5X's names: each module here is a door to the rooms of `rosetta_t5` that do the work."""
