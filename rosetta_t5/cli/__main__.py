"""`python -m rosetta_t5.cli` runs the command `rosetta-t5`."""

import sys

from rosetta_t5.cli import main

if __name__ == "__main__":
  sys.exit(main())
