"""T5X's `precompile`: compiles a train step ahead of its run."""

from rosetta_t5.precompile import (
  main,
  precompile,
)

if __name__ == "__main__":
  main()
