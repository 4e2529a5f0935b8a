"""`rosetta-t5 bench` from a checkout: python -m benchmarks.train_step --size base --batch 128."""

from rosetta_t5.bench.train_step import main

if __name__ == "__main__":
  main()
