"""`python -m t5x.export`: exports as the command line and its gin files say."""

from __future__ import annotations

from collections.abc import Sequence

from rosetta_t5 import config
from rosetta_t5.export.saving import save
from rosetta_t5.plan import describe_run


def main(argv: Sequence[str] | None = None) -> None:
  """Runs `save` as the command line and its gin files say."""
  config.run_from_command_line(save, argv, describe_run)
