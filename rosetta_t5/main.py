"""One door to every run: `python -m t5x.main --run_mode=train`."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from rosetta_t5 import config
from rosetta_t5.plan import describe_run


@enum.unique
class RunMode(enum.Enum):
  """What --run_mode takes (T5X: RunMode)."""

  TRAIN = "train"
  EVAL = "eval"
  INFER = "infer"
  PRECOMPILE = "precompile"
  EXPORT = "export"


def main(argv: Sequence[str] | None = None) -> None:
  """Runs what --run_mode names, or else what the gin files bind arguments of (T5X: main)."""
  config.run_from_command_line(None, argv, describe_run)
