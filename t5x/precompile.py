"""T5X's `precompile`: compiles the training step before a run."""

from rosetta_t5.precompile import (
  main,
  precompile,
)

if __name__ == "__main__":
  main()
