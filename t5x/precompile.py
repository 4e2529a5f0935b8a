"""T5X's `precompile`: compiles the training step before a run."""

if __name__ == "__main__":
  from rosetta_t5.cli import begin

  begin("t5x.precompile")

from rosetta_t5.precompile import main, precompile

if __name__ == "__main__":
  main()
