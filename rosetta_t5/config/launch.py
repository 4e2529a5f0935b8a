"""From the command line to the run page."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from rosetta_t5.config.check import Resolved, Rows, check
from rosetta_t5.config.checks.completeness import check_required
from rosetta_t5.config.checks.t5x_installation import check_which_t5x
from rosetta_t5.config.command_line import CommandLine, parse_command_line, usage
from rosetta_t5.config.errors import DEBUG_VARIABLE, ConfigError, Problems, errors_as_text
from rosetta_t5.config.language.binding import configure
from rosetta_t5.config.language.statements import read_program
from rosetta_t5.config.t5x.run_functions import RUN_MODES, find_script, runs_named_in


def run_from_command_line(
  function: Callable[..., Any] | None,
  argv: Sequence[str] | None = None,
  describe: Callable[[Resolved], Rows] | None = None,
) -> Any:
  """Runs `function` as the command line and its gin files configure it.

  Whatever can be known to be wrong is said before TensorFlow is imported, and the rest before a
  device is touched. Errors that are the user's to mend end the program with their text alone.

  Args:
    function: a run page such as `train`. Gin files know it as `train_script.train`. None takes the
      one that --run_mode names, or else the gin files bind arguments of.
    argv: the program's name and its arguments; None for those of this process.
    describe: tells, for --dry_run, what a resolved run is.

  Returns:
    What `function` returns; None for --help and --dry_run.
  """
  is_own_process = argv is None or argv[0].startswith("rosetta-t5")
  argv = sys.argv if argv is None else argv
  with errors_as_text():
    command = parse_command_line(argv)
    if command.help:
      print(usage(f"python -m t5x.{function.__name__ if function else 'main'}"))
      return None
    if command.debug:
      os.environ[DEBUG_VARIABLE] = "1"
    if not (command.gin_file or command.gin_bindings):
      raise ConfigError("there is nothing to run: --gin_file=gin/examples/quickstart.gin")
    check_which_t5x()
    function = function or _chosen(command)
    if command.dry_run:
      with _quietly_on_the_cpu() if is_own_process else contextlib.nullcontext():
        text = check(command, function, describe)
      print(text)
      return None
    if function is None:
      raise ConfigError(f"the gin files bind no run. Say which: --run_mode={'|'.join(RUN_MODES)}")
    program = read_program(command.gin_file, command.gin_bindings, command.gin_search_paths)
    check_required(program)
    _prepare(command)
    run = configure(program, function)
    return run() if command.shard_id is None else run(shard_id=command.shard_id)


def _chosen(command: CommandLine) -> Callable[..., Any] | None:
  """The run that --run_mode names; else the only one that the gin files bind arguments of."""
  if command.run_mode:
    return find_script(RUN_MODES[command.run_mode])
  program = read_program(
    command.gin_file, command.gin_bindings, command.gin_search_paths, Problems()
  )
  names = runs_named_in(program)
  if len(names) > 1:
    raise ConfigError(
      f"the gin files bind several runs ({', '.join(names)}). Say which: "
      f"--run_mode={'|'.join(mode for mode, name in RUN_MODES.items() if name in names)}"
    )
  return find_script(names[0]) if names else None


@contextlib.contextmanager
def _quietly_on_the_cpu() -> Iterator[None]:
  """A check computes nothing: jax answers from the CPU; what a user's module imports keeps quiet."""
  import jax

  from rosetta_t5.data.tensorflow_setup.start_notes import without_start_notes
  from rosetta_t5.data.tensorflow_setup.tensorflow_import import silence_tensorflow

  jax.config.update("jax_platforms", "cpu")
  silence_tensorflow()
  with without_start_notes():
    yield


def _prepare(command: CommandLine) -> None:
  """Joins the other processes, and makes TensorFlow ready for gin files that import seqio.

  TensorFlow comes before gin parses because it must not find a GPU to take. It comes in this
  thread: beside another that imports jax or parses gin it is slower (9.3 s against 8.3 s on two
  cores), for both want Python's one interpreter lock.
  """
  from rosetta_t5.distributed import join_processes
  from rosetta_t5.parallel import enable_compilation_cache, keep_freed_memory

  keep_freed_memory()
  enable_compilation_cache()
  join_processes(
    command.multiprocess_gpu,
    command.coordinator_address,
    command.process_count,
    command.process_index,
    command.initialization_timeout,
  )
  if find_spec("seqio"):
    from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_seqio

    seqio = import_seqio()
    if command.tfds_data_dir:
      seqio.set_tfds_data_dir_override(command.tfds_data_dir)
    seqio.add_global_cache_dirs(command.seqio_additional_cache_dirs)
