"""T5X's command line: the flags of a run and their values."""

import argparse
import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from absl import app, flags

from rosetta_t5 import terminal
from rosetta_t5.config.language.statements import Program, read_program
from rosetta_t5.config.t5x_surface import RUN_MODES
from rosetta_t5.user_errors import DEBUG_VARIABLE, ConfigError, Problems

# A gin binding → the flags that people expect to set the same.
_BINDINGS = {
  "utils.create_learning_rate_scheduler.base_learning_rate": "lr learning_rate base_learning_rate",
  "BATCH_SIZE": "batch_size batch global_batch_size",
  "TRAIN_STEPS": "steps train_steps max_steps num_steps",
  "MIXTURE_OR_TASK_NAME": "task mixture mixture_or_task_name",
  "DROPOUT_RATE": "dropout dropout_rate",
  "MODEL_DIR": "model_dir output_dir",
  "RANDOM_SEED": "seed random_seed",
}
_bool, _integer, _string = flags.DEFINE_bool, flags.DEFINE_integer, flags.DEFINE_string
_list, _multi = flags.DEFINE_list, flags.DEFINE_multi_string


def _flag(define: Callable[..., Any], default: Any, description: str, **more: Any) -> Any:
  """Returns a field of CommandLine with the absl function that defines its flag, and its arguments."""
  metadata = {"define": define, "default": default, "help": description, **more}
  return dataclasses.field(metadata=metadata)


@dataclasses.dataclass(frozen=True)
class CommandLine:
  """The flags of a run and their values. --help prints the descriptions."""

  gin_file: Sequence[str] = _flag(_multi, [], "A gin file. Repeat it for more; later files win.")
  gin_bindings: Sequence[str] = _flag(_multi, [], "A gin statement; the same as --gin.NAME=VALUE.")
  gin_search_paths: Sequence[str] = _flag(
    _list, ["."], "Folders that are searched for gin files and their includes, before the recipes."
  )
  tfds_data_dir: str | None = _flag(_string, None, "The folder of TensorFlow Datasets' data.")
  seqio_additional_cache_dirs: Sequence[str] = _flag(_list, [], "Folders with cached SeqIO tasks.")
  multiprocess_gpu: bool = _flag(_bool, False, "This is one of several processes of one run.")
  coordinator_address: str | None = _flag(_string, None, "HOST:PORT of process 0.")
  process_count: int | None = _flag(_integer, None, "The number of processes.")
  process_index: int | None = _flag(_integer, None, "The index of this process, from 0.")
  initialization_timeout: int = _flag(_integer, 1800, "Seconds to wait for all processes.")
  run_mode: str | None = _flag(
    flags.DEFINE_enum, None, "What to run.", enum_values=RUN_MODES, only_for="main"
  )
  dry_run: bool = _flag(_bool, False, "Report all problems and what would run; use no device.")
  devices: int | None = _flag(
    _integer, None, "Number of devices of a dry run (default: those of this machine)."
  )
  shard_id: int | None = _flag(_integer, None, "The shard to process.", only_for="infer")
  debug: bool = _flag(_bool, False, f"Print the tracebacks of all errors ({DEBUG_VARIABLE}=1).")
  help: bool = _flag(_bool, False, "Print this help.")

  def read_program(self, problems: Problems | None = None) -> Program:
    """Reads the gin files and bindings; see `statements.read_program`."""
    return read_program(self.gin_file, self.gin_bindings, self.gin_search_paths, problems)


def parse_command_line(argv: Sequence[str]) -> CommandLine:
  """Parses the arguments of a run; `argv[0]` is the program.

  Flags that other code has defined (absl's --alsologtostderr, --jax_…) are parsed too.

  Raises:
    ConfigError: a flag is unknown or has a value of the wrong type, or an argument is not a flag.
  """
  _define_flags()
  if any(argument.startswith("--jax_") for argument in argv):
    import jax

    jax.config.parse_flags_with_absl()
  try:
    _, *rest = flags.FLAGS(rewrite_gin_args(argv))
  except flags.UnrecognizedFlagError as error:
    hint = suggest_binding(error.flagname, error.flagvalue.partition("=")[2])
    raise ConfigError(f"{error}{hint and '.'}{hint}\n  --help lists the flags.") from error
  except flags.Error as error:
    raise ConfigError(f"{error}\n  --help lists the flags.") from error
  if rest:
    hint = f" Did you mean --{rest[0]}?" if rest[0].startswith("gin") else ""
    raise ConfigError(f"unexpected argument {rest[0]!r}.{hint}\n  --help lists the flags.")
  values: dict[str, Any] = {
    field.name: flags.FLAGS[field.name].value for field in dataclasses.fields(CommandLine)
  }
  return CommandLine(**values)


def split_flags(
  arguments: Sequence[str], program: str, own_options: Collection[str]
) -> tuple[list[str], list[str]]:
  """Separates a program's own arguments from the flags that `parse_command_line` parses.

  Args:
    arguments: the arguments, such as ["a.gin", "--devices", "8", "--gin.TRAIN_STEPS=3"].
    program: the name of the program, such as "check".
    own_options: the program's own options, such as {"--gpu"}.

  Returns:
    The program's own arguments, such as ["a.gin"], and the flags, such as ["--devices=8",
    "--gin.TRAIN_STEPS=3"]: each with its value, which may have followed after a space.

  Raises:
    ConfigError: an argument --gin.NAME has no value.
  """
  _define_flags()
  own_fields = _fields_of(program)
  of_other_programs = {f.name for f in dataclasses.fields(CommandLine) if f not in own_fields}
  accepted = {*flags.FLAGS} - of_other_programs
  own, found, rest = [], [], iter(arguments)
  for argument in rest:
    option, equals, _ = argument.partition("=")
    name = option.lstrip("-")
    if not argument.startswith("-") or option in own_options:
      own.append(argument)
    elif name in accepted and not (equals or flags.FLAGS[name].boolean):
      found.append("=".join([argument, *itertools.islice(rest, 1)]))
    elif name.startswith(("gin.", "jax_")) or {name, name.removeprefix("no")} & accepted:
      found.append(argument)
    else:
      own.append(argument)
  rewrite_gin_args(found)
  return own, found


def add_flags(parser: argparse.ArgumentParser, program: str) -> None:
  """Adds the flags to a parser that prints --help or completes words; it does not parse them."""
  group = parser.add_argument_group("flags, as with T5X")
  text = "Sets NAME = VALUE after the gin files."
  group.add_argument("--gin.NAME=VALUE", action="store_true", help=text)
  for field in _fields_of(program):
    if f"--{field.name}" not in terminal.option_names(parser):
      is_switch = field.metadata["define"] is _bool
      more: dict[str, Any] = {"action": "store_true"} if is_switch else {"metavar": "VALUE"}
      if field.metadata["define"] is _multi:
        more["action"] = "append"
      group.add_argument(f"--{field.name}", help=field.metadata["help"], **more)


def suggest_binding(option: str, value: str) -> str:
  """Returns " Set … " with the --gin flag for an option that gin bindings replace, or "".

  Args:
    option: what was given, such as --lr, --TRAIN_STEPS or --T5Config.emb_dim.
    value: its value; "" if it has none.
  """
  name = option.lstrip("-").replace("-", "_")
  known = (binding for binding, flags in _BINDINGS.items() if name.lower() in flags.split())
  binding = name if name.isupper() or "." in name else next(known, None)
  if binding is None:
    return ""
  is_text = re.fullmatch(r"[A-Za-z_/~][\w./~:-]*", value) and value not in ("True", "False", "None")
  return f" Set --gin.{binding}=" + (f"\"'{value}'\"" if is_text else value or "VALUE")


def usage(program: str) -> str:
  """Returns the text of --help of `python -m t5x.PROGRAM`."""
  parser = argparse.ArgumentParser(f"python -m t5x.{program}", add_help=False)
  add_flags(parser, program)
  return parser.format_help()


def rewrite_gin_args(args: Sequence[str]) -> list[str]:
  """Returns the arguments with each --gin.NAME=VALUE as --gin_bindings=NAME = VALUE (T5X's function).

  Raises:
    ConfigError: an argument --gin.NAME has no value.
  """
  rewritten = []
  for argument in args:
    name, equals, value = argument.removeprefix("--gin.").partition("=")
    is_binding = argument.startswith("--gin.")
    if is_binding and not equals:
      raise ConfigError(
        f"Gin bindings must be of the form '--gin.<param>=<value>', got: {argument}"
      )
    rewritten.append(f"--gin_bindings={name} = {value}" if is_binding else argument)
  return rewritten


def run(main: Callable[[list[str]], Any]) -> None:
  """Runs a user's own program with --gin.NAME=VALUE flags among its absl flags (T5X: run)."""
  app.run(main, flags_parser=lambda args: app.parse_flags_with_usage(rewrite_gin_args(args)))


def run_main(main: Callable[[list[str]], Any], flags_parser: Callable[..., Any]) -> None:
  """Runs a user's own program with its own flag parser (T5X: utils.run_main)."""
  app.run(main, flags_parser=flags_parser)


def _fields_of(program: str) -> list[dataclasses.Field[Any]]:
  """Returns the flags of a program, such as `infer`."""
  fields = dataclasses.fields(CommandLine)
  return [field for field in fields if field.metadata.get("only_for", program) == program]


def _define_flags() -> None:
  """Defines the flags, except those that this function or a user's script has defined before."""
  for field in dataclasses.fields(CommandLine):
    if field.name not in flags.FLAGS:
      more = {k: v for k, v in field.metadata.items() if k not in ("define", "only_for")}
      field.metadata["define"](name=field.name, **more)
  flags.FLAGS.unparse_flags()


def add_trust_option(parser: argparse.ArgumentParser) -> None:
  """Adds --trust.

  Without it, the command uses only names on the allow list (`config/language/allow_list.py`).
  """
  group = parser.add_argument_group("files from elsewhere (docs/security.md)")
  group.add_argument("--trust", action="store_true", help="run whatever code the gin files name")
