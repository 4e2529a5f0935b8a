"""T5X's module names. Each module re-exports names from the packages of `rosetta_t5`."""
