"""T5X's `infer`: `python -m t5x.infer --gin_file=…`."""

if __name__ == "__main__":
  from rosetta_t5.cli import run_module

  raise SystemExit(run_module("infer"))

from rosetta_t5.data.tasks.file_task import create_task_from_tfexample_file
from rosetta_t5.infer import infer, main
from rosetta_t5.inference.result_files import *
from t5x.utils import Inferences as _Inferences
from t5x.utils import extract_tokens_and_aux_values as _extract_tokens_and_aux_values


def update_measurement_series(series_name: str, step: int, value: float) -> None:
  """Does nothing, as in T5X."""
