"""The quickstart: prepares text and a vocabulary, trains a small T5, and shows the result."""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from rosetta_t5 import checkpoints
from rosetta_t5.data.local_files import stdlib_corpus
from rosetta_t5.distributed import RunInterrupted
from rosetta_t5.inference.infilling import BlankFiller
from rosetta_t5.terminal.command import begin
from rosetta_t5.trained_model import open_checkpoint, run_arguments

GIN_FILE = "gin/examples/quickstart.gin"
RUN_FOLDER = pathlib.Path("quickstart/run")
SENTENCES = (
  "Return the ____ of the object as a string.",
  "Raise an exception if the file does not ____.",
  "This method is called ____ the connection is closed.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 quickstart`, which are the flags of `rosetta-t5 train`."""
  parser.set_defaults(run=lambda options: main(options.flags))


def main(argv: Sequence[str] | None = None) -> int:
  """Trains a small T5 on the text of Python's standard library, and shows the result.

  A second call resumes an unfinished run, and leaves a finished one unchanged.

  Args:
    argv: further arguments for the training command, such as --gin.TRAIN_STEPS=1000.

  Returns:
    The exit status of the training command.
  """
  options = list(argv or ())
  facts = stdlib_corpus.prepare()
  _say(
    f"Text: {facts['train_paragraphs'] + facts['validation_paragraphs']:,} paragraphs, "
    f"{facts['characters'] / 1e6:.1f} MB: {facts['source']}",
    f"In {os.path.relpath(stdlib_corpus.data_folder())}, with a vocabulary of "
    f"{stdlib_corpus.VOCAB_SIZE:,} tokens trained on it.",
  )
  started_at = checkpoints.latest_step(RUN_FOLDER)
  if started_at:
    _say(f"The run in {RUN_FOLDER} resumes from step {started_at}.")
  status = _train(options)
  if status:
    return status
  if started_at and checkpoints.latest_step(RUN_FOLDER) == started_at:
    _say(f"The run in {RUN_FOLDER} was already finished, so nothing was trained.")
  _show_results(options)
  return 0


def _train(options: Sequence[str]) -> int:
  """Trains as the training command does, and returns its exit status."""
  from rosetta_t5 import train

  arguments = [f"--gin_file={GIN_FILE}", *options]
  _say("Training with this command:", f"  {_python()} -m t5x.train {' '.join(arguments)}", "")
  try:
    train.main(["rosetta-t5 train", *arguments])
  except RunInterrupted:
    raise
  except SystemExit as end:
    _say("", f"Training ended with exit status {end.code}; see the error above.")
    return int(end.code or 0)
  return 0


def _python() -> str:
  """Returns the command for this Python; `make` uses a virtual environment without activating it."""
  in_path = shutil.which("python")
  # Symbolic links are not resolved: they lead out of a virtual environment.
  if in_path is not None and os.path.abspath(in_path) == os.path.abspath(sys.executable):
    return "python"
  return os.path.relpath(sys.executable)


def _show_results(options: Sequence[str]) -> None:
  """Prints losses, filled blanks, the files of the run, and commands to try next."""
  recipe = read_recipe(options)
  model_dir = pathlib.Path(recipe["model_dir"])
  task = recipe["train_eval_dataset_cfg"].name
  _say("", "Loss in nats per token:")
  for name, what in (("train", "training"), (f"training_eval/{task}", "held-out text")):
    first, last = first_and_last_loss(model_dir / name)
    _say(f"  {what:14}{first[1]:.2f} at step {first[0]}, {last[1]:.2f} at step {last[0]}")
  _say("", "Blanks filled by the model:")
  latest = checkpoints.RestoreCheckpointConfig(os.fspath(model_dir.absolute()), mode="latest")
  opened = open_checkpoint(recipe, latest)
  fill = BlankFiller(opened.model, opened.state.params, opened.lengths["inputs"])
  for filled in fill(SENTENCES):
    _say(f"  {filled}")
  _say("", *_closing_lines(model_dir))


def read_recipe(options: Sequence[str]) -> dict[str, Any]:
  """Returns the arguments that the gin file and the options give to the training run."""
  from rosetta_t5.config.command_line import parse_command_line

  command = parse_command_line(["quickstart", f"--gin_file={GIN_FILE}", *options])
  return run_arguments(command.read_program())


def first_and_last_loss(folder: pathlib.Path) -> tuple[tuple[int, float], tuple[int, float]]:
  """Returns (step, loss per token) of the first and the last entry in TensorBoard's files."""
  from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
  from tensorboard.util import tensor_util

  events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
  entries = events.Tensors("loss_per_nonpadding_target_token")
  losses = sorted(
    (entry.step, float(tensor_util.make_ndarray(entry.tensor_proto))) for entry in entries
  )
  return losses[0], losses[-1]


def _closing_lines(model_dir: pathlib.Path) -> list[str]:
  step = checkpoints.latest_step(model_dir)
  command = f"{_python()} -m t5x.train --gin_file={GIN_FILE}"
  return [
    f"The files of the run are in {os.path.relpath(model_dir)}: the model (checkpoint_{step}), TensorBoard's files, "
    "config.gin, model-info.txt.",
    "",
    "Commands to try next:",
    f"  {command} --gin.TRAIN_STEPS=2000  # train for more steps",
    f"  {command} --gin.MODEL_DIR=\"'quickstart/wider'\" --gin.network.T5Config.emb_dim=256",
    f"  {_python()} -m rosetta_t5.cli report {os.path.relpath(model_dir)}  # shows the run in one page",
    f"  tensorboard --logdir={os.path.relpath(model_dir)}",
  ]


def _say(*lines: str) -> None:
  # Flushed, since the training command writes to the same terminal.
  print("\n".join(lines), flush=True)


if __name__ == "__main__":
  begin("rosetta-t5 quickstart")
  sys.exit(main(sys.argv[1:]))
