"""`rosetta-t5 finetune MODEL DATA…`: writes OUT/finetune.gin with every choice, and trains as it says."""

from __future__ import annotations

import argparse
import math
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rosetta_t5 import terminal
from rosetta_t5.cli.finetune.choices import Monitor
from rosetta_t5.cli.finetune.methods import METHODS, RATE
from rosetta_t5.cli.finetune.recipe import SEED, make_recipe
from rosetta_t5.cli.finetune.rows import open_data
from rosetta_t5.files import write_atomically
from rosetta_t5.terminal import positive_integer, positive_number
from rosetta_t5.user_errors import ConfigError

RECIPE = "finetune.gin"
# Options: their name, type and help, in which the name in brackets is that of the gin binding.
_OF_ROWS: Sequence[tuple[str, Any, str]] = (
  ("inputs", str, "a column, or a template: 'question: {question}' (data.file_task.inputs)"),
  ("targets", str, "a column, or a template (data.file_task.targets)"),
  ("eval", str, "files that only evaluate; default: some rows (data.file_task.validation_files)"),
  ("metrics", str, "such as accuracy or rouge; default: by the targets (data.file_task.metrics)"),
)
_CHOSEN: Sequence[tuple[str, Any, str]] = (
  ("steps", positive_integer, "optimizer steps (TRAIN_STEPS)"),
  ("epochs", positive_number, "how often a row is read, in place of --steps (TRAIN_STEPS)"),
  ("batch_size", positive_integer, "rows of a step (BATCH_SIZE)"),
  ("learning_rate", positive_number, f"({RATE})"),
  ("input_length", positive_integer, "tokens; the rest is cut (TASK_FEATURE_LENGTHS)"),
  ("target_length", positive_integer, "tokens; the rest is cut (TASK_FEATURE_LENGTHS)"),
  ("precision", str, "float32, or bfloat16, the default on GPUs (network.T5Config.dtype)"),
  ("seed", int, f"of shuffling and dropout; default: 0 (RANDOM_SEED, {SEED})"),
  (
    "patience",
    positive_integer,
    "end when so many evaluations in a row improve nothing (trainer.EarlyStoppingAction.patience)",
  ),
)
_MORE: dict[str, Mapping[str, Any]] = {
  "eval": {"nargs": "+"},
  "metrics": {"nargs": "+"},
  "seed": {"default": 0},
}
_MORE["precision"] = {"choices": ("float32", "bfloat16")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 finetune`."""
  add = parser.add_argument
  add(
    "model",
    metavar="MODEL",
    help="a Hugging Face folder, OWNER/NAME on its hub, a run, or a T5X checkpoint with its config.gin "
    "(INITIAL_CHECKPOINT_PATH, MODEL)",
  )
  add(
    "data",
    nargs="+",
    metavar="DATA",
    help="jsonl, json, csv, tsv, parquet or arrow files, a folder that `save_to_disk` wrote, or SeqIO "
    "tasks (data.file_task.files, MIXTURE_OR_TASK_NAME)",
  )
  add("--out", required=True, metavar="FOLDER", help="of the run; it continues one (MODEL_DIR)")
  add("--dry_run", action="store_true", help=f"print {RECIPE} with every choice and its reason")
  methods = parser.add_argument_group(
    "method; default: --full, or --lora 16 if that does not fit"
  ).add_mutually_exclusive_group()
  for name, method in METHODS.items():
    methods.add_argument(f"--{name}", **method.option)
  for group, options in (("rows of files", _OF_ROWS), ("chosen unless given", _CHOSEN)):
    add = parser.add_argument_group(group).add_argument
    for name, kind, text in options:
      add(f"--{name}", type=kind, help=text, **_MORE.get(name, {}))
  # The run itself uses what the recipe names, so this is not the option of other commands.
  text = "run whatever code MODEL's config.gin names (docs/security.md)"
  parser.add_argument("--trust", dest="trusts_model", action="store_true", help=text)
  parser.set_defaults(run=finetune)


def finetune(options: argparse.Namespace) -> int:
  """Chooses, writes the recipe, and trains as it says; returns the exit status."""
  from rosetta_t5.config.command_line import parse_command_line

  if options.steps and options.epochs:
    raise ConfigError("--steps and --epochs both set TRAIN_STEPS: give one of them")
  given = parse_command_line(["rosetta-t5 finetune", *options.flags])
  data = open_data(options)
  text, monitor = make_recipe(options, data, given.gin_file, given.gin_bindings)
  if options.dry_run:
    print(text)
    return 0
  terminal.tolerate_lost_output()
  file = pathlib.Path(options.out, RECIPE)
  _check_same_settings(file, text)
  file.parent.mkdir(parents=True, exist_ok=True)
  write_atomically(file, text)
  print(f"{file} has all that was chosen, with the reasons. This command trains as it says:")
  print(f"  python -m t5x.train --gin_file={shlex.quote(str(file))}\n", flush=True)
  from rosetta_t5 import train

  train.main(["rosetta-t5 train", f"--gin_file={file}", *options.flags])
  print(_closing_text(options, monitor))
  return 0


def _check_same_settings(file: pathlib.Path, text: str) -> None:
  """Raises ConfigError if a run in the folder of the recipe has begun with other settings."""
  from rosetta_t5.checkpoints import is_hugging_face, latest_step
  from rosetta_t5.config import changes_since
  from rosetta_t5.config.language.statements import read_program

  if not file.exists() and (latest_step(file.parent) is not None or is_hugging_face(file.parent)):
    raise ConfigError(f"--out {file.parent} has another model: choose a new folder for the run")
  if not file.exists() or latest_step(file.parent) is None:
    return
  if lines := changes_since(file.parent, read_program([], [text])):
    changed = "\n  ".join(lines)
    raise ConfigError(
      f"{file.parent} has a run with other settings:\n  {changed}\nChoose another --out, or continue that "
      f"run as it is, or with changes: rosetta-t5 train --gin_file={file} [--gin.NAME=VALUE …]"
    )


def _closing_text(options: argparse.Namespace, monitor: Monitor) -> str:
  """Returns the best checkpoint and the commands that use it."""
  from rosetta_t5.checkpoints import all_steps
  from rosetta_t5.checkpoints.saved_items import populate_metrics_for_steps

  steps, folder = all_steps(options.out), options.out
  values = populate_metrics_for_steps(folder, f"{monitor.folder}/{monitor.name}", steps)
  sign = -1 if monitor.mode == "min" else 1
  best = max(steps, key=lambda step: (sign * values.get(step, -sign * math.inf), step))
  if best != steps[-1]:
    folder = f"{folder}/checkpoint_{best}"
  value = f": {monitor.name} {values[best]:.4g}" if best in values else ""
  return (
    f"\nThe best checkpoint is checkpoint_{best}{value}. Commands to try next:\n"
    f"  rosetta-t5 infer --model_dir {folder} --input new_rows.jsonl\n"
    f"  rosetta-t5 convert {folder} a_folder --to hf\n  rosetta-t5 report {options.out}"
  )
