"""The verbs of `rosetta-t5` that start runs: train, eval, infer and check."""

from __future__ import annotations

import argparse
import functools
import importlib

from rosetta_t5.cli import text_commands


def train_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 train`."""
  parser.set_defaults(run=functools.partial(_run_main, "train"))


def eval_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 eval`."""
  parser.set_defaults(run=functools.partial(_run_main, "eval"))


def infer_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 infer`."""
  text_commands.infer_arguments(parser)
  parser.set_defaults(run=_infer)


def check_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 check`."""
  parser.add_argument("files", nargs="*", metavar="FILE", help="a gin file, such as a recipe")
  parser.set_defaults(run=_check)


def _infer(options: argparse.Namespace) -> int:
  return _run_main("infer", options) if options.input is None else text_commands.infer(options)


def _check(options: argparse.Namespace) -> int:
  options.flags = [*(f"--gin_file={file}" for file in options.files), *options.flags, "--dry_run"]
  return _run_main("main", options)


def _run_main(module: str, options: argparse.Namespace) -> int:
  """Runs `rosetta_t5.train`, `eval`, `infer` or `main` with T5X's flags."""
  program = f"rosetta-t5 {module}"
  importlib.import_module(f"rosetta_t5.{module}").main([program, *options.flags])
  return 0
