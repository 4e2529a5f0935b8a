"""T5X's `train`: `python -m t5x.train --gin_file=…`."""

if __name__ == "__main__":
  from rosetta_t5.cli import run_module

  raise SystemExit(run_module("train"))

from rosetta_t5.train import main, train
from rosetta_t5.training.actions import run_actions
