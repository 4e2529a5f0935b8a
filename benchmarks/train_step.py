"""`rosetta-t5 bench` from a checkout: python -m benchmarks.train_step --size base --batch 128."""

import sys

from rosetta_t5.cli import bench

if __name__ == "__main__":
  sys.exit(bench(sys.argv[1:]))
