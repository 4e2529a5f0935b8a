"""T5X's `train`: `python -m t5x.train --gin_file=…`."""

if __name__ == "__main__":
  from rosetta_t5.cli import begin

  begin("t5x.train")

from rosetta_t5.cli import run_module
from rosetta_t5.train import main, train
from rosetta_t5.training.actions import run_actions

if __name__ == "__main__":
  raise SystemExit(run_module("train"))
