"""T5X's `export`: `python -m t5x.export --gin_file=…`."""

if __name__ == "__main__":
  from rosetta_t5.cli import begin

  begin("t5x.export")

from rosetta_t5.export.saved_model import main

if __name__ == "__main__":
  main()
