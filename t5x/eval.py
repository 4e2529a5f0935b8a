"""T5X's `eval`: `python -m t5x.eval --gin_file=…`."""

if __name__ == "__main__":
  from rosetta_t5.cli import run_module

  raise SystemExit(run_module("eval"))

from rosetta_t5.eval import evaluate, main
from rosetta_t5.inference.evaluation import InferenceEvaluator
