"""T5X's functions that configure runs with Fiddle. Only gin is supported, so most raise an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from absl import flags

from rosetta_t5.config import command_line
from rosetta_t5.telemetry.user_errors import ConfigError

_FLAGS = ("fdl_config", "fdl_config_file", "fdl_help")


def using_fdl() -> bool:
  """Returns whether one of Fiddle's flags is set."""
  return any(name in flags.FLAGS and flags.FLAGS[name].value for name in _FLAGS)


def prepare_to_summarize(config: Any) -> Any:
  """Raises ConfigError: Fiddle is not supported."""
  _raise_unsupported(f"prepare_to_summarize({config!r})")


def sanitize_summary_getter(config: Any) -> Any:
  """Raises ConfigError: Fiddle is not supported."""
  _raise_unsupported(f"sanitize_summary_getter({config!r})")


def direct_summarize_fiddle_config(
  model_dir: str,
  summary_writer: Any,
  step: int,
  get_current_fiddle_config: Callable[[], Any] | None = None,
) -> None:
  """Raises ConfigError: Fiddle is not supported. Use `gin_utils.summarize_gin_config`."""
  _raise_unsupported("direct_summarize_fiddle_config")


def config_with_fiddle(function: Callable[..., Any]) -> Any:
  """Raises ConfigError: Fiddle is not supported."""
  _raise_unsupported(f"config_with_fiddle({function.__name__})")


def run(main: Callable[[list[str]], Any]) -> None:
  """Runs a user's own program with --gin.NAME=VALUE and jax's flags among its absl flags (T5X)."""
  import jax

  jax.config.parse_flags_with_absl()
  command_line.run(main)


def _raise_unsupported(what: str) -> NoReturn:
  raise ConfigError(
    f"config_utils.{what} needs Fiddle, which is not supported: configure the run with gin "
    "(--gin_file=…), and bind summarize_config_fn = @gin_utils.summarize_gin_config"
  )
