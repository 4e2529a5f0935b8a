"""One command for every run: `python -m t5x.main --run_mode=train`."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from rosetta_t5 import config
from rosetta_t5.plan.description import describe_run


@enum.unique
class RunMode(enum.Enum):
  """The values of --run_mode (T5X: RunMode)."""

  TRAIN = "train"
  EVAL = "eval"
  INFER = "infer"
  PRECOMPILE = "precompile"
  EXPORT = "export"


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the function that --run_mode names, or else the one that the gin files configure (T5X: main)."""
  config.run_from_command_line(None, argv, describe_run)
