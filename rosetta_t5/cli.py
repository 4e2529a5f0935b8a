"""The `rosetta-t5` command: one short function a verb."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence


def train(arguments: Sequence[str]) -> int:
  """Train a model; the arguments are those of `python -m t5x.train`."""
  return _run("train", arguments)


def eval(arguments: Sequence[str]) -> int:
  """Evaluate checkpoints; the arguments are those of `python -m t5x.eval`."""
  return _run("eval", arguments)


def infer(arguments: Sequence[str]) -> int:
  """Write predictions or scores, as `python -m t5x.infer`; or for texts: --model_dir, --input."""
  if any(argument.split("=")[0] == "--input" for argument in arguments):
    from rosetta_t5.text_commands import infer as infer_texts

    return infer_texts(arguments)
  return _run("infer", arguments)


def chat(arguments: Sequence[str]) -> int:
  """Fill the blanks of sentences that you type: chat MODEL_DIR."""
  from rosetta_t5.text_commands import chat as chat_with

  return chat_with(arguments)


def check(arguments: Sequence[str]) -> int:
  """Say all that is wrong with gin files, and what they would run: check FILE… [--gin.X=Y]."""
  files = [f"--gin_file={a}" if not a.startswith("-") else a for a in arguments]
  return _run("main", [*files, "--dry_run"])


def plan(arguments: Sequence[str]) -> int:
  """Estimate memory, time and traffic of a recipe on GPUs: plan RECIPE --devices 64 [--gpu h100]."""
  from rosetta_t5.plan.plan_command import main as run_plan

  return run_plan(arguments)


def _run(module: str, arguments: Sequence[str]) -> int:
  sys.path.insert(0, os.getcwd())  # as python -m does: gin files import the user's modules
  page = importlib.import_module(f"rosetta_t5.{module}")
  page.main([f"rosetta-t5 {module}", *arguments])
  return 0


def convert(arguments: Sequence[str]) -> int:
  """Write a checkpoint in another layout: convert SRC DST --to {t5x,t5x-legacy,hf,rosetta}."""
  from rosetta_t5.conversion.convert import main as run_convert

  return run_convert(arguments)


def ckpt(arguments: Sequence[str]) -> int:
  """Look into checkpoints of any layout: ckpt ls|show|diff|verify PATH."""
  from rosetta_t5.checkpoints.inspect_command import main as run_inspection

  return run_inspection(arguments)


def vocab(arguments: Sequence[str]) -> int:
  """Train a vocabulary on your text, or look at one: vocab train --input GLOB --out FILE."""
  from rosetta_t5.data.vocabularies.vocab_command import main as run_vocab

  return run_vocab(arguments)


def prepare(arguments: Sequence[str]) -> int:
  """Tokenise text into indexed shards: prepare --input GLOB --vocab MODEL --out DIR."""
  from rosetta_t5.data.prepared.prepare_command import main as run_prepare

  return run_prepare(arguments)


def inspect(arguments: Sequence[str]) -> int:
  """Show a task's batches as text, how full they are, and what is wrong: inspect TASK."""
  from rosetta_t5.data.inspection.inspect_task import main as run_inspect

  return run_inspect(arguments)


def quickstart(arguments: Sequence[str]) -> int:
  """Train a small T5 on the text of Python's own library, here and now."""
  from rosetta_t5.quickstart import main as run_quickstart

  return run_quickstart(arguments)


def bench(arguments: Sequence[str]) -> int:
  """Time a training step here: bench --size base; bench fp8: does fp8 pay; bench hugging-face."""
  from rosetta_t5.config.errors import DEBUG_VARIABLE, exit_on_user_error

  others = {"fp8": "fp8", "hugging-face": "hugging_face"}
  module = others.get(arguments[0]) if arguments else None
  page = importlib.import_module(f"rosetta_t5.bench.{module or 'train_step'}")
  if "--debug" in arguments:
    os.environ[DEBUG_VARIABLE] = "1"
  with exit_on_user_error():
    page.main(arguments[1:] if module else arguments)
  return 0


def doctor(arguments: Sequence[str]) -> int:
  """Show what is installed, what is missing, and the devices."""
  from rosetta_t5.doctor import examine

  return examine()


VERBS = {
  verb.__name__: verb
  for verb in (
    train,
    eval,
    infer,
    chat,
    check,
    plan,
    convert,
    ckpt,
    vocab,
    prepare,
    inspect,
    quickstart,
    bench,
    doctor,
  )
}


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the verb that the command line names and returns the exit status."""
  verb, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
  if verb in ("-h", "--help", "help"):
    print("rosetta-t5 VERB …\n")
    print("\n".join(f"  {name:<12}{function.__doc__}" for name, function in VERBS.items()))
    return 0
  if verb not in VERBS:
    like = " Did you mean {}?".format(*difflib.get_close_matches(verb, VERBS, n=1) or ["train"])
    print(f"error: rosetta-t5 has no verb {verb!r}.{like}", file=sys.stderr)
    print(f"  its verbs: {', '.join(VERBS)}", file=sys.stderr)
    return 2
  return VERBS[verb](arguments)


if __name__ == "__main__":
  from rosetta_t5.cli import main as run

  for name in VERBS:  # Gin files look for runs in __main__, and the verbs are none.
    del globals()[name]
  sys.exit(run())
