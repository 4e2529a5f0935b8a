"""Runs `rosetta-t5 bench` from a checkout: python -m benchmarks.train_step --size base --batch 128."""

import sys

from rosetta_t5.cli import main

if __name__ == "__main__":
  sys.exit(main(["bench", *sys.argv[1:]]))
