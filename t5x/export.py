"""T5X's `export`: `python -m t5x.export --gin_file=…`."""

from rosetta_t5.export.page import (
  main,
)

if __name__ == "__main__":
  main()
