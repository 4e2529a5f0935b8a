"""`rosetta-t5 finetune MODEL DATA…`: writes OUT/finetune.gin with every choice, and trains as it says."""

import argparse
import pathlib
import shlex

from rosetta_t5 import terminal
from rosetta_t5.cli.finetune.methods import METHODS, RATE
from rosetta_t5.cli.finetune.recipe import SEED, make_recipe
from rosetta_t5.cli.finetune.rows import open_data
from rosetta_t5.files import write_atomically
from rosetta_t5.terminal import positive_integer, positive_number
from rosetta_t5.user_errors import ConfigError

RECIPE = "finetune.gin"
_MODEL = (
  "a Hugging Face folder, OWNER/NAME on its hub, a run, or a T5X checkpoint with its config.gin "
  "(INITIAL_CHECKPOINT_PATH, MODEL)"
)
_DATA = (
  "jsonl, json, csv, tsv, parquet or arrow files, a folder that `save_to_disk` wrote, or SeqIO tasks "
  "(data.file_task.files, MIXTURE_OR_TASK_NAME)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 finetune`."""
  add = parser.add_argument
  add("model", metavar="MODEL", help=_MODEL)
  add("data", nargs="+", metavar="DATA", help=_DATA)
  add("--out", required=True, metavar="FOLDER", help="of the run; it continues one (MODEL_DIR)")
  add("--dry_run", action="store_true", help=f"print {RECIPE} with every choice and its reason")
  group = parser.add_argument_group("method; default: --full, or --lora 16 if that does not fit")
  add = group.add_mutually_exclusive_group().add_argument
  for name, method in METHODS.items():
    value = {"type": positive_integer, "metavar": method.argument.upper()}
    add(f"--{name}", help=method.help, **(value if method.argument else {"action": "store_true"}))
  group = parser.add_argument_group("rows of files; a template is 'question: {question}'")
  add = group.add_argument
  add("--inputs", help="a column, or a template (data.file_task.inputs)")
  add("--targets", help="a column, or a template (data.file_task.targets)")
  text = "files that only evaluate; default: some rows (data.file_task.validation_files)"
  add("--eval", nargs="+", help=text)
  text = "such as accuracy or rouge; default: by the targets (data.file_task.metrics)"
  add("--metrics", nargs="+", help=text)
  add = parser.add_argument_group("chosen unless given").add_argument
  add("--steps", type=positive_integer, help="optimizer steps (TRAIN_STEPS)")
  text = "how often a row is read, in place of --steps (TRAIN_STEPS)"
  add("--epochs", type=positive_number, help=text)
  add("--batch_size", type=positive_integer, help="rows of a step (BATCH_SIZE)")
  add("--learning_rate", type=positive_number, help=f"({RATE})")
  for name in ("input_length", "target_length"):
    text = "tokens; the rest is cut (TASK_FEATURE_LENGTHS)"
    add(f"--{name}", type=positive_integer, help=text)
  text = "the default is bfloat16 on GPUs (network.T5Config.dtype)"
  add("--precision", choices=("float32", "bfloat16"), help=text)
  text = f"of shuffling and dropout; default: 0 (RANDOM_SEED, {SEED})"
  add("--seed", type=int, default=0, help=text)
  text = "end after so many evaluations without progress (trainer.EarlyStoppingAction.patience)"
  add("--patience", type=positive_integer, help=text)
  # The run itself uses what the recipe names, so this is not the option of other commands.
  text = "run whatever code MODEL's config.gin names (docs/security.md)"
  parser.add_argument("--trust", dest="trust_model", action="store_true", help=text)
  parser.set_defaults(run=finetune)


def finetune(options: argparse.Namespace) -> int:
  """Chooses, writes the recipe, and trains as it says; returns the exit status."""
  from rosetta_t5.config.command_line import parse_command_line

  if options.steps and options.epochs:
    raise ConfigError("--steps and --epochs both set TRAIN_STEPS: give one of them")
  given = parse_command_line(["rosetta-t5 finetune", *options.flags])
  data = open_data(options)
  text = make_recipe(options, data, given.gin_file, given.gin_bindings)
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
  from rosetta_t5.checkpoints import best_checkpoint

  train.main(["rosetta-t5 train", f"--gin_file={file}", *options.flags])
  best, value = best_checkpoint(options.out)
  named = f"The best checkpoint is {best.name}: {value}. " if best else ""
  print(
    f"\n{named}Commands to try next:\n"
    f"  rosetta-t5 infer --model_dir {options.out} --input new_rows.jsonl\n"
    f"  rosetta-t5 convert {options.out} a_folder --to hf\n  rosetta-t5 report {options.out}"
  )
  return 0


def _check_same_settings(file: pathlib.Path, text: str) -> None:
  """Raises ConfigError if a run in the folder of the recipe has begun with other settings."""
  from rosetta_t5.checkpoints import is_hugging_face, latest_step
  from rosetta_t5.config import changes_since
  from rosetta_t5.config.language.statements import read_program

  has_run = latest_step(file.parent) is not None
  if not file.exists() and (has_run or is_hugging_face(file.parent)):
    raise ConfigError(f"--out {file.parent} has another model: choose a new folder for the run")
  if has_run and (lines := changes_since(file.parent, read_program([], [text]))):
    changed = "\n  ".join(lines)
    raise ConfigError(
      f"{file.parent} has a run with other settings:\n  {changed}\nChoose another --out, or continue that "
      f"run as it is, or with changes: rosetta-t5 train --gin_file={file} [--gin.NAME=VALUE …]"
    )
