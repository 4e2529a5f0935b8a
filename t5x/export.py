"""T5X's `export`: `python -m t5x.export --gin_file=…`."""

from rosetta_t5.export.page import (
  main,
)

__all__ = [
  "main",
]

if __name__ == "__main__":
  main()
