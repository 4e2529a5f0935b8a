"""T5X's `config_utils`: `run`, and whether a run is configured by Fiddle, which is not supported."""

from collections.abc import Callable
from typing import Any

import jax

from rosetta_t5.config import command_line


def using_fdl() -> bool:
  """Returns False: Fiddle is not supported."""
  return False


def run(main: Callable[[list[str]], Any]) -> None:
  """Runs a user's own program with --gin.NAME=VALUE and jax's flags among its absl flags (T5X)."""
  jax.config.parse_flags_with_absl()
  command_line.run(main)
