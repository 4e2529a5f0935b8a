"""T5X's `config_utils`: `run`, and functions for Fiddle, which raise because it is not supported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from absl import flags

from rosetta_t5.config import command_line
from rosetta_t5.user_errors import ConfigError

_FLAGS = ("fdl_config", "fdl_config_file", "fdl_help")


def using_fdl() -> bool:
  """Returns whether one of Fiddle's flags is set."""
  return any(name in flags.FLAGS and flags.FLAGS[name].value for name in _FLAGS)


def unsupported(*args: Any, **kwargs: Any) -> NoReturn:
  """Raises ConfigError: Fiddle is not supported. Use `gin_utils.summarize_gin_config`."""
  raise ConfigError(
    "this function of config_utils needs Fiddle, which is not supported: configure the run with gin "
    "(--gin_file=…), and bind summarize_config_fn = @gin_utils.summarize_gin_config"
  )


config_with_fiddle = direct_summarize_fiddle_config = unsupported
prepare_to_summarize = sanitize_summary_getter = unsupported


def run(main: Callable[[list[str]], Any]) -> None:
  """Runs a user's own program with --gin.NAME=VALUE and jax's flags among its absl flags (T5X)."""
  import jax

  jax.config.parse_flags_with_absl()
  command_line.run(main)
