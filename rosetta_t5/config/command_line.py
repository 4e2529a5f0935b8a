"""T5X's command line, read into plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags

from rosetta_t5.config.errors import DEBUG_VARIABLE, ConfigError
from rosetta_t5.config.t5x.run_functions import RUN_MODES

# How to define it, name, default, help; the choices, if there are a few.
_FLAGS: tuple[tuple[Any, ...], ...] = (
  (flags.DEFINE_multi_string, "gin_file", [], "A gin file, found through the search paths. Give it "
   "as often as there are files; later ones win."),
  (flags.DEFINE_multi_string, "gin_bindings", [], "One statement, as it would stand in a gin file; "
   "wins over the files. --gin.NAME=VALUE is the same as --gin_bindings='NAME = VALUE'."),
  (flags.DEFINE_list, "gin_search_paths", ["."], "Folders in which gin files and what they include "
   "are looked for, before the recipes."),
  (flags.DEFINE_string, "tfds_data_dir", None, "Where TensorFlow Datasets keeps its data."),
  (flags.DEFINE_list, "seqio_additional_cache_dirs", [], "Folders with cached SeqIO tasks."),
  (flags.DEFINE_bool, "multiprocess_gpu", False, "This is one of several processes of one run."),
  (flags.DEFINE_string, "coordinator_address", None, "HOST:PORT of process 0."),
  (flags.DEFINE_integer, "process_count", None, "How many processes there are."),
  (flags.DEFINE_integer, "process_index", None, "Which of them this is, from 0."),
  (flags.DEFINE_integer, "initialization_timeout", 1800, "Seconds to wait for all processes."),
  (flags.DEFINE_enum, "run_mode", None, "What to run; for t5x.main.", RUN_MODES),
  (flags.DEFINE_bool, "dry_run", False, "Resolve everything, say all that is wrong, print what would "
   "be run, and touch no device."),
  (flags.DEFINE_integer, "devices", None, "How many devices the run is for; for --dry_run, which "
   "touches none. Default: those of this machine."),
  (flags.DEFINE_integer, "shard_id", None, "Which shard of the examples this is for; for t5x.infer."),
  (flags.DEFINE_bool, "debug", False, f"Show tracebacks of all errors ({DEBUG_VARIABLE}=1)."),
  (flags.DEFINE_bool, "help", False, "Show this."),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CommandLine:
  """What stands on the command line; `_FLAGS` says what each means."""

  gin_file: Sequence[str] = ()
  gin_bindings: Sequence[str] = ()
  gin_search_paths: Sequence[str] = (".",)
  tfds_data_dir: str | None = None
  seqio_additional_cache_dirs: Sequence[str] = ()
  multiprocess_gpu: bool = False
  coordinator_address: str | None = None
  process_count: int | None = None
  process_index: int | None = None
  initialization_timeout: int = 1800
  run_mode: str | None = None
  dry_run: bool = False
  devices: int | None = None
  shard_id: int | None = None
  debug: bool = False
  help: bool = False


def parse_command_line(argv: Sequence[str]) -> CommandLine:
  """Reads the arguments of a run; `argv[0]` is the program.

  Flags that other code has defined (absl's --alsologtostderr, --jax_… ) are read too.

  Raises:
    ConfigError: an unknown flag (with like ones), a value of the wrong kind, a stray argument.
  """
  _define_flags()
  if any(argument.startswith("--jax_") for argument in argv):
    _read_jax_flags()
  try:
    _, *rest = flags.FLAGS(rewrite_gin_args(argv))
  except flags.Error as error:
    raise ConfigError(f"{error}\n  --help lists the flags.") from error
  if rest:
    hint = f" Did you mean --{rest[0]}?" if rest[0].startswith("gin") else ""
    raise ConfigError(
      f"there is an argument too many: {rest[0]!r}.{hint}\n  --help lists the flags."
    )
  values: dict[str, Any] = {
    field.name: flags.FLAGS[field.name].value for field in dataclasses.fields(CommandLine)
  }
  return CommandLine(**values)


def usage(program: str) -> str:
  """What --help prints."""
  example = f"{program} --gin_file=gin/examples/quickstart.gin --gin.TRAIN_STEPS=100"
  return f"Usage, as with T5X:\n  {example}\n{flags.FLAGS.module_help(__name__)}"


def rewrite_gin_args(args: Sequence[str]) -> list[str]:
  """Turns each --gin.NAME=VALUE into --gin_bindings=NAME = VALUE (T5X: rewrite_gin_args)."""
  return [_rewrite(argument) for argument in args]


def run(main: Callable[[list[str]], Any]) -> None:
  """Runs a user's own program with --gin.NAME=VALUE flags among its absl flags (T5X: run)."""
  app.run(main, flags_parser=lambda args: app.parse_flags_with_usage(rewrite_gin_args(args)))


def run_main(main: Callable[[list[str]], Any], flags_parser: Callable[..., Any]) -> None:
  """Runs a user's own program with its own parser of flags (T5X: utils.run_main)."""
  app.run(main, flags_parser=flags_parser)


def _rewrite(argument: str) -> str:
  if not argument.startswith("--gin."):
    return argument
  name, equals, value = argument.removeprefix("--gin.").partition("=")
  if not equals:
    raise ConfigError(f"{argument} has no value: write {argument}=VALUE")
  return f"--gin_bindings={name} = {value}"


def _define_flags() -> None:
  """Defines our flags once; those that a user's script has defined stay as they are."""
  for define, name, default, text, *choices in _FLAGS:
    if name not in flags.FLAGS:
      define(name, default, *choices, text)
  flags.FLAGS.unparse_flags()


def _read_jax_flags() -> None:
  import jax

  jax.config.parse_flags_with_absl()
