"""The command `rosetta-t5`: a table of verbs."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rosetta_t5 import __version__


def _run_main(module: str, arguments: Sequence[str]) -> int:
  """Runs a module such as `rosetta_t5.train` with the flags of `python -m t5x.train`."""
  sys.path.insert(0, os.getcwd())  # as `python -m` does: gin files import the user's modules
  importlib.import_module(f"rosetta_t5.{module}").main([f"rosetta-t5 {module}", *arguments])
  return 0


def _infer(arguments: Sequence[str]) -> int:
  if any(argument.split("=")[0] == "--input" for argument in arguments):
    return _call("text_commands:infer", arguments)
  return _run_main("infer", arguments)


def _check(arguments: Sequence[str]) -> int:
  files = [f"--gin_file={a}" if not a.startswith("-") else a for a in arguments]
  return _run_main("main", [*files, "--dry_run"])


def _bench(arguments: Sequence[str]) -> int:
  from rosetta_t5.telemetry.user_errors import DEBUG_VARIABLE, exit_on_user_error

  modules = {"fp8": "fp8_comparison", "hugging-face": "hugging_face"}
  module = modules.get(arguments[0]) if arguments else None
  if "--debug" in arguments:
    os.environ[DEBUG_VARIABLE] = "1"
  with exit_on_user_error():
    _call(f"bench.{module or 'train_step'}:main", arguments[1:] if module else arguments)
  return 0


def _call(target: str, arguments: Sequence[str]) -> Any:
  """Calls MODULE:FUNCTION of rosetta_t5, which is imported only now."""
  module, _, function = target.partition(":")
  return getattr(importlib.import_module(f"rosetta_t5.{module}"), function)(arguments)


# Verb → (the function that runs it, or its MODULE:FUNCTION; help text).
VERBS: dict[str, tuple[str | Callable[[Sequence[str]], int], str]] = {
  "train": (
    partial(_run_main, "train"),
    "Train a model; takes the flags of `python -m t5x.train`.",
  ),
  "eval": (
    partial(_run_main, "eval"),
    "Evaluate checkpoints; takes the flags of `python -m t5x.eval`.",
  ),
  "infer": (
    _infer,
    "Write predictions or scores, with the flags of `python -m t5x.infer`; or use texts from a file: "
    "--model_dir, --input.",
  ),
  "chat": ("text_commands:chat", "Fill the blanks in sentences that you type: chat MODEL_DIR."),
  "check": (
    _check,
    "Report all errors in gin files, and what they would run: check FILE… [--gin.X=Y].",
  ),
  "plan": (
    "plan.plan_command:main",
    "Estimate memory, time and traffic of a recipe on GPUs: plan RECIPE --devices 64 [--gpu h100].",
  ),
  "compile": (
    "gpu_program.compile_command:main",
    "Compile a recipe's step for GPUs that need not be here: compile RECIPE --gpu h200 --devices 64.",
  ),
  "convert": (
    "conversion.convert:main",
    "Write a checkpoint in another format: convert SRC DST --to {t5x,t5x-legacy,hf,rosetta}.",
  ),
  "ckpt": (
    "checkpoints.inspect_command:main",
    "Inspect checkpoints of any format: ckpt ls|show|diff|verify PATH.",
  ),
  "vocab": (
    "data.vocabularies.vocab_command:main",
    "Train a vocabulary on your text, or inspect one: vocab train --input GLOB --out FILE.",
  ),
  "prepare": (
    "data.prepared.prepare_command:main",
    "Tokenize text into indexed shards: prepare --input GLOB --vocab MODEL --out DIR.",
  ),
  "inspect": (
    "data.inspection.inspect_task:main",
    "Show a task's batches as text, their padding and their problems: inspect TASK.",
  ),
  "quickstart": (
    "quickstart:main",
    "Train a small T5 on the text of Python's standard library, on this machine.",
  ),
  "bench": (
    _bench,
    "Time a training step: bench --size base; compare fp8 with bfloat16: bench fp8; time Hugging Face's "
    "T5: bench hugging-face.",
  ),
  "doctor": ("doctor:main", "Show what is installed, what is missing, and the devices."),
}


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the verb on the command line and returns the exit status."""
  verb, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
  if verb in ("-h", "--help", "help"):
    print("rosetta-t5 VERB …\n")
    print("\n".join(f"  {name:<12}{text}" for name, (_, text) in VERBS.items()))
    return 0
  if verb == "--version":
    print(f"rosetta-t5 {__version__}")
    return 0
  if verb not in VERBS:
    near = difflib.get_close_matches(verb, VERBS, n=1) or ["train"]
    print(f"error: rosetta-t5 has no verb {verb!r}. Did you mean {near[0]}?", file=sys.stderr)
    print(f"  verbs: {', '.join(VERBS)}", file=sys.stderr)
    return 2
  run, _ = VERBS[verb]
  return _call(run, arguments) if isinstance(run, str) else run(arguments)


if __name__ == "__main__":
  # Gin files look up run functions in __main__, so the verbs must not be found there.
  from rosetta_t5.cli import main as run

  sys.exit(run())
