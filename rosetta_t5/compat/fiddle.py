"""T5X's `config_utils`: configuration by Fiddle, which is not offered; gin does all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from absl import flags

from rosetta_t5.config import command_line
from rosetta_t5.config.errors import ConfigError

_FLAGS = ("fdl_config", "fdl_config_file", "fdl_help")


def using_fdl() -> bool:
  """Whether one of Fiddle's flags is given."""
  return any(name in flags.FLAGS and flags.FLAGS[name].value for name in _FLAGS)


def prepare_to_summarize(config: Any) -> Any:
  """Refuses, as Fiddle is not offered."""
  _refuse(f"prepare_to_summarize({config!r})")


def sanitize_summary_getter(config: Any) -> Any:
  """Refuses, as Fiddle is not offered."""
  _refuse(f"sanitize_summary_getter({config!r})")


def direct_summarize_fiddle_config(
  model_dir: str,
  summary_writer: Any,
  step: int,
  get_current_fiddle_config: Callable[[], Any] | None = None,
) -> None:
  """Refuses, as Fiddle is not offered; `gin_utils.summarize_gin_config` has these arguments too."""
  _refuse("direct_summarize_fiddle_config")


def config_with_fiddle(function: Callable[..., Any]) -> Any:
  """Refuses, as Fiddle is not offered."""
  _refuse(f"config_with_fiddle({function.__name__})")


def run(main: Callable[[list[str]], Any]) -> None:
  """Runs a user's own program with --gin.NAME=VALUE and jax's flags among its absl flags (T5X)."""
  import jax

  jax.config.parse_flags_with_absl()
  command_line.run(main)


def _refuse(what: str) -> NoReturn:
  raise ConfigError(
    f"config_utils.{what} needs Fiddle, which is not supported: configure the run by gin "
    "(--gin_file=…), and bind summarize_config_fn = @gin_utils.summarize_gin_config"
  )
