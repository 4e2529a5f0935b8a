"""The quickstart: pretrains a small T5 on text, finetunes it on dates, and shows the result."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shlex
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from rosetta_t5 import checkpoints, terminal
from rosetta_t5.data import quickstart_data
from rosetta_t5.data.quickstart_data import write_dates
from rosetta_t5.distributed import RunInterrupted
from rosetta_t5.run_report.run_folder import read_runs
from rosetta_t5.trained_model import run_arguments

PRETRAIN = "gin/examples/quickstart.gin"
FINETUNE = "gin/examples/quickstart_dates.gin"
DATES = pathlib.Path("quickstart/dates.jsonl")
_PRETRAIN_STEPS, _FINETUNE_STEPS = 1200, 400  # as in the recipes
_SHOWN = 8  # predictions


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 quickstart`, which are the flags of `rosetta-t5 train`."""
  parser.set_defaults(run=lambda options: main(options.flags))


def main(argv: Sequence[str] | None = None) -> int:
  """Pretrains a small T5 on the text of Python's standard library, and finetunes it on dates.

  A second call resumes what is unfinished, and leaves finished runs unchanged.

  Args:
    argv: further arguments of both training commands, such as --gin.network.T5Config.emb_dim=256.
      --gin.TRAIN_STEPS and --gin.MODEL_DIR are those of the pretraining.

  Returns:
    The exit status of the training command that failed, or 0.
  """
  terminal.continue_without_output()
  options = list(argv or ())
  facts = quickstart_data.prepare()
  write_dates(DATES)
  _say(
    f"Text: {facts['train_paragraphs'] + facts['validation_paragraphs']:,} paragraphs, "
    f"{facts['characters'] / 1e6:.1f} MB: {facts['source']}",
    f"In {os.path.relpath(quickstart_data.data_folder())}, with a vocabulary of "
    f"{quickstart_data.VOCAB_SIZE:,} tokens trained on it.",
  )
  if status := _train("Pretraining", PRETRAIN, options):
    return status
  recipe = read_recipe(options)
  pretrained = pathlib.Path(recipe["model_dir"])
  finetuned = pretrained.with_name(f"{pretrained.name}_dates")
  step = checkpoints.latest_step(pretrained) or 0
  if options or step != _PRETRAIN_STEPS:  # else the recipe's own values are the same
    options += [
      f"--gin.INITIAL_CHECKPOINT_PATH='{pretrained}/checkpoint_{step}'",
      f"--gin.TRAIN_STEPS={step + _FINETUNE_STEPS}",
      f"--gin.MODEL_DIR='{finetuned}'",
    ]
  if status := _train("Finetuning", FINETUNE, options):
    return status
  _say("", "Loss of the pretraining in nats per token:")
  task = recipe["train_eval_dataset_cfg"].name
  for name, what in (("train", "training"), (f"training_eval/{task}", "held-out text")):
    first, last = first_and_last_loss(pretrained, name)
    _say(f"  {what:14}{first[1]:.2f} at step {first[0]}, {last[1]:.2f} at step {last[0]}")
  _say("", *_prediction_lines(finetuned / "inference_eval"), "", *_closing_lines(finetuned))
  return 0


def _train(what: str, gin_file: str, options: Sequence[str]) -> int:
  """Trains as the training command does, and returns its exit status."""
  from rosetta_t5 import train

  arguments = [f"--gin_file={gin_file}", *options]
  _say(
    "",
    f"{what} with this command:",
    f"  {_python()} -m t5x.train {' '.join(map(_quote, arguments))}",
    "",
  )
  try:
    train.main(["rosetta-t5 train", *arguments])
  except RunInterrupted:
    raise
  except SystemExit as end:
    _say("", f"{what} ended with exit status {end.code}; see the error above.")
    return int(end.code or 0)
  return 0


def _quote(argument: str) -> str:
  """Quotes an argument for a shell, in double quotes where that is more legible."""
  is_plain = "'" in argument and not set('"$`\\!') & set(argument)
  return f'"{argument}"' if is_plain else shlex.quote(argument)


def _python() -> str:
  """Returns the command for this Python; `make` uses a virtual environment without activating it."""
  in_path = shutil.which("python")
  # Symbolic links are not resolved: they lead out of a virtual environment.
  if in_path is not None and os.path.abspath(in_path) == os.path.abspath(sys.executable):
    return "python"
  return os.path.relpath(sys.executable)


def read_recipe(options: Sequence[str]) -> dict[str, Any]:
  """Returns the arguments that the gin file and the options give to the training run."""
  from rosetta_t5.config.command_line import parse_command_line

  command = parse_command_line(["quickstart", f"--gin_file={PRETRAIN}", *options])
  return run_arguments(command.read_program())


def first_and_last_loss(
  model_dir: pathlib.Path, group: str
) -> tuple[tuple[int, float], tuple[int, float]]:
  """Returns (step, loss in nats per token) of the first and the last entry in TensorBoard's files.

  Args:
    model_dir: the folder of a run.
    group: the folder of event files in it, such as `train`.
  """
  run = read_runs([os.fspath(model_dir)])[0]
  losses = run.series[group]["loss_per_nonpadding_target_token"]
  first, last = ((int(losses.steps[n]), float(losses.values[n])) for n in (0, -1))
  return first, last


def _prediction_lines(folder: pathlib.Path) -> list[str]:
  """Returns the first of the last predictions beside their targets, and the number that match."""
  last = max(folder.glob("dates-*[0-9].jsonl"))
  rows = [json.loads(line) for line in last.read_text().splitlines()]
  table = [("date", "prediction", "target")]
  table += [
    (r["input"]["inputs_pretokenized"], r["prediction"], r["target"]) for r in rows[:_SHOWN]
  ]
  width = max(len(cells[0]) for cells in table)
  matches = sum(row["prediction"] == row["target"] for row in rows)
  return [
    "Dates that the model has not seen, and its predictions:",
    *(f"  {text:{width}}  {prediction:12}{target}" for text, prediction, target in table),
    f"{matches} of {len(rows)} predictions equal their targets.",
  ]


def _closing_lines(model_dir: pathlib.Path) -> list[str]:
  model = os.path.relpath(model_dir)
  verbs = f"{_python()} -m rosetta_t5.cli"
  pretrain = f"{_python()} -m t5x.train --gin_file={PRETRAIN}"
  return [
    f"The files of the runs are in {model.removesuffix('_dates')} and {model}: checkpoints, "
    "TensorBoard's files, config.gin, model-info.txt.",
    "",
    "Commands to try next:",
    '  echo "the 25th of December 2026" > my_dates.txt',
    f"  {verbs} infer --model_dir {model} --input my_dates.txt  # dates of your own",
    f"  {verbs} report {model}  # shows the run in one page",
    f"  {pretrain} --gin.MODEL_DIR=\"'quickstart/wider'\" --gin.network.T5Config.emb_dim=256",
  ]


def _say(*lines: str) -> None:
  # Flushed, since the training command writes to the same terminal.
  print("\n".join(lines), flush=True)


if __name__ == "__main__":
  terminal.begin("rosetta-t5 quickstart")
  sys.exit(main(sys.argv[1:]))
