"""T5X's `main`: `python -m t5x.main --run_mode=train --gin_file=…`."""

if __name__ == "__main__":
  from rosetta_t5.cli import begin

  begin("t5x.main")

from rosetta_t5.main import RunMode, main

if __name__ == "__main__":
  main()
