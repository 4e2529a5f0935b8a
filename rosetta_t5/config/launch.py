"""Starts the run that a command line and its gin files describe."""

import copy
import functools
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import gin

from rosetta_t5 import user_errors
from rosetta_t5.config.binding_checks import check_required
from rosetta_t5.config.command_line import CommandLine, parse_command_line, usage
from rosetta_t5.config.configuration import ResolvedRun, Rows, configure, dry_run
from rosetta_t5.config.language.binding import bind
from rosetta_t5.config.language.gin_internals import all_bindings
from rosetta_t5.config.language.statements import Binding, Import, Program
from rosetta_t5.config.saved_config import without_modules
from rosetta_t5.config.t5x_surface import RUN_MODES, check_t5x_installation, find_run_function
from rosetta_t5.user_errors import ConfigError, Problems, exit_on_user_error, printable


def run_from_command_line(
  function: Callable[..., Any] | None,
  argv: Sequence[str] | None = None,
  describe: Callable[[ResolvedRun], Rows] | None = None,
) -> Any:
  """Runs `function` as the command line and its gin files configure it.

  Missing values are reported before TensorFlow is imported, and all other problems of the
  configuration before a device is touched. User errors are printed without a traceback.

  Args:
    function: a run function such as `train`. Gin files refer to it as `train_script.train`. None for
      the function that --run_mode names, or else the one whose arguments the gin files bind.
    argv: the program's name and its arguments; None for those of this process.
    describe: returns the description of a run that --dry_run prints.

  Returns:
    What `function` returns; None for --help and --dry_run.
  """
  is_own_process = argv is None or argv[0].startswith("rosetta-t5")
  argv = sys.argv if argv is None else argv
  with exit_on_user_error():
    command = parse_command_line(argv)
    if command.help:
      programs = {name: mode for mode, name in RUN_MODES.items()}
      print(usage(programs[function.__name__] if function else "main"))
      return None
    if command.debug:
      os.environ[user_errors.DEBUG_VARIABLE] = "1"
    if not (command.gin_file or command.gin_bindings):
      raise ConfigError("there is nothing to run: --gin_file=gin/examples/quickstart.gin")
    check_t5x_installation()
    function = function or _select_run(command)
    if command.dry_run:
      if is_own_process:
        import jax

        jax.config.update("jax_platforms", "cpu")  # A dry run computes nothing.
        _import_seqio(command)
      print(printable(dry_run(command, function, describe)))
      return None
    if function is None:
      raise ConfigError(f"the gin files bind no run. Set --run_mode={'|'.join(RUN_MODES)}")
    run = configure(_read_and_join(command), function)
    return run() if command.shard_id is None else run(shard_id=command.shard_id)


def read_macros(argv: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
  """Returns the values of the macros that gin files bind; those that are not bound are left out.

  Args:
    argv: as for `run_from_command_line`.
    names: the macros, such as MIXTURE_OR_TASK_NAME.

  Raises:
    ConfigError: lists what is wrong in the files.
  """
  command = parse_command_line(argv)
  bind(command.read_program(), _select_run(command)).raise_if_any()
  bound = all_bindings()
  found = {n: bound[n, "gin.macro"]["value"] for n in names if (n, "gin.macro") in bound}
  try:
    return copy.deepcopy(found)  # gin calls @f() when it is copied
  finally:
    gin.clear_config()


def _select_run(command: CommandLine) -> Callable[..., Any] | None:
  """Returns the run that --run_mode names, or else the only one that the gin files bind, or None."""
  if command.run_mode:
    return find_run_function(RUN_MODES[command.run_mode])
  names = runs_bound_by(command.read_program(Problems()))  # errors are reported later
  if len(names) > 1:
    modes = "|".join(mode for mode, name in RUN_MODES.items() if name in names)
    raise ConfigError(
      f"the gin files bind several runs ({', '.join(names)}). Set --run_mode={modes}"
    )
  return find_run_function(names[0]) if names else None


def runs_bound_by(program: Program) -> list[str]:
  """Returns the runs whose arguments a program binds through an import of `__main__`, in order."""
  aliases = {"__main__", "export_lib"}  # T5X's gin files bind the export by its module
  names = []
  for statement in program.statements:
    if isinstance(statement, Import) and statement.gin_statement.module == "__main__":
      aliases.add(statement.gin_statement.bound_name())
    elif isinstance(statement, Binding):
      first, *rest = statement.selector.split(".")
      if first in aliases and len(rest) == 1:
        names += rest
      elif statement.argument and not rest:
        names.append(first)  # on the command line, train.X reaches the run without an import
  return [name for name in dict.fromkeys(names) if name in RUN_MODES.values()]


def _read_and_join(command: CommandLine) -> Program:
  """Reads the gin files, and joins the other processes of the run."""

  @functools.cache
  def read() -> Program:
    program = command.read_program()
    check_required(program)
    return program

  def settings() -> dict[str, str]:
    bindings = read().effective_bindings().values()
    return {binding.name: repr(without_modules(binding.value)) for binding in bindings}

  if not command.multiprocess_gpu:  # Several processes meet first: an error must end all of them.
    read()
  join_run(command, settings)
  return read()


def join_run(command: CommandLine, settings: Callable[[], dict[str, str]] = dict) -> None:
  """Joins the other processes of the run, which must have the same settings, and then imports TensorFlow.

  TensorFlow is imported in this thread. Beside a thread that imports jax or parses gin the import
  takes longer (9.3 s instead of 8.3 s on two cores), because both need Python's interpreter lock.
  """
  from rosetta_t5.distributed import join_processes
  from rosetta_t5.parallel.process_settings import enable_compilation_cache, keep_freed_memory

  keep_freed_memory()
  enable_compilation_cache()
  join_processes(
    command.multiprocess_gpu,
    command.coordinator_address,
    command.process_count,
    command.process_index,
    command.initialization_timeout,
    settings,
  )
  _import_seqio(command)


def _import_seqio(command: CommandLine) -> None:
  """Imports TensorFlow and SeqIO before a gin file does, so that TensorFlow does not take a GPU."""
  if not find_spec("seqio"):
    return
  from rosetta_t5.data.tensorflow_import import import_seqio

  seqio = import_seqio()
  if command.tfds_data_dir:
    seqio.set_tfds_data_dir_override(command.tfds_data_dir)
  seqio.add_global_cache_dirs(command.seqio_additional_cache_dirs)
