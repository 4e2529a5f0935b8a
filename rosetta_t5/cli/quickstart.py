"""The quickstart: pretrains a small T5 on text, finetunes it on dates, and shows the result."""

import argparse
import json
import os
import pathlib
import shlex
from collections.abc import Sequence

from rosetta_t5 import checkpoints, terminal
from rosetta_t5.config.launch import read_macros
from rosetta_t5.data import quickstart_data

PRETRAIN = "gin/examples/quickstart.gin"
FINETUNE = "gin/examples/quickstart_dates.gin"
DATES = pathlib.Path("quickstart/dates.jsonl")
_FINETUNE_STEPS = 400
_NUM_SHOWN_PREDICTIONS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 quickstart`, which are the flags of `rosetta-t5 train`."""
  parser.set_defaults(run=lambda options: main(options.flags))


def main(argv: Sequence[str] = ()) -> int:
  """Pretrains a small T5 on the text of Python's standard library, and finetunes it on dates.

  A second call resumes what is unfinished, and leaves finished runs unchanged.

  Args:
    argv: further arguments of both training commands, such as --gin.network.T5Config.emb_dim=256.
      --gin.TRAIN_STEPS and --gin.MODEL_DIR are those of the pretraining.

  Raises:
    SystemExit: a training command has failed and printed its error.
  """
  terminal.tolerate_lost_output()
  text = quickstart_data.prepare()
  quickstart_data.write_dates(DATES)
  _say(
    f"Text: {text['characters'] / 1e6:.1f} million characters of the {text['source']}, in "
    f"{os.path.relpath(quickstart_data.data_folder())}"
  )
  _train("Pretraining", PRETRAIN, argv)
  macros = read_macros(["rosetta-t5", f"--gin_file={PRETRAIN}", *argv], ["MODEL_DIR"])
  pretrained = pathlib.Path(macros["MODEL_DIR"])
  finetuned = pretrained.with_name(f"{pretrained.name}_dates")
  step = checkpoints.latest_step(pretrained) or 0
  changes = (
    f"--gin.INITIAL_CHECKPOINT_PATH='{pretrained}/checkpoint_{step}'",
    f"--gin.TRAIN_STEPS={step + _FINETUNE_STEPS}",
    f"--gin.MODEL_DIR='{finetuned}'",
  )
  _train("Finetuning", FINETUNE, [*argv, *changes])
  _say(
    "",
    *_prediction_lines(finetuned / "inference_eval"),
    f"\nThe files of the runs are in {pretrained} and {finetuned}.",
    "\nCommands to try next:",
    '  echo "the 25th of December 2026" > my_dates.txt',
    f"  rosetta-t5 infer --model_dir {finetuned} --input my_dates.txt  # dates of your own",
    f"  rosetta-t5 report {finetuned}  # shows the run in one page",
  )
  return 0


def _train(what: str, gin_file: str, options: Sequence[str]) -> None:
  """Trains as the training command does."""
  from rosetta_t5 import train

  arguments = [f"--gin_file={gin_file}", *options]
  # Gin strings contain single quotes, so these arguments are shown in double quotes.
  words = (f'"{word}"' if "'" in word else shlex.quote(word) for word in arguments)
  _say(f"\n{what} with this command:", f"  python -m t5x.train {' '.join(words)}", "")
  train.main(["rosetta-t5 train", *arguments])


def _prediction_lines(folder: pathlib.Path) -> list[str]:
  """Returns the first of the last predictions beside their targets, and the number that match."""
  last = max(folder.glob("dates-*[0-9].jsonl"))
  rows = [json.loads(line) for line in last.read_text().splitlines()]
  shown = [
    (row["input"]["inputs_pretokenized"], row["prediction"], row["target"])
    for row in rows[:_NUM_SHOWN_PREDICTIONS]
  ]
  width = max(len(text) for text, _, _ in shown)
  matches = sum(row["prediction"] == row["target"] for row in rows)
  return [
    "Dates that the model has not seen, its predictions, and the targets:",
    *(f"  {text:{width}}  {prediction:12}{target}" for text, prediction, target in shown),
    f"{matches} of {len(rows)} predictions equal their targets.",
  ]


def _say(*lines: str) -> None:
  # Flushed, since the training command writes to the same terminal.
  print("\n".join(lines), flush=True)
