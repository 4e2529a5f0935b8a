"""Makes the gin file of `rosetta-t5 finetune`: the model, and the choices with their reasons."""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from rosetta_t5.cli.finetune import choices
from rosetta_t5.cli.finetune.choices import Choice, Code
from rosetta_t5.cli.finetune.methods import candidates, method_lines
from rosetta_t5.terminal import size_text
from rosetta_t5.user_errors import ConfigError

SEED = "train/utils.DatasetConfig.seed"
_IMPORTS = """
from __gin__ import dynamic_registration
import __main__ as train_script
import seqio
from rosetta_t5 import data
from t5x import checkpoints
from t5x import models
from t5x import trainer
from t5x import utils
"""
_READING = (
  Choice("USE_CACHED_TASKS", False),
  Choice("train/utils.DatasetConfig.pack", False, "a row is an example, so steps are epochs"),
  Choice("train_eval/utils.DatasetConfig.pack", False),
)
# What arrays may use of a CPU's memory, which other programs use too, and of a GPU's.
_USABLE = {"CPU": 0.5, "GPU": 0.9}


def make_recipe(
  options: argparse.Namespace, data: Any, files: Sequence[str], bindings: Sequence[str]
) -> str:
  """Returns the gin file.

  Args:
    options: the values of the command's arguments.
    data: a `rows.Files` or `rows.Tasks`.
    files: gin files of the user, which are included at the end.
    bindings: gin statements of the user, which come last.

  Raises:
    ValueError: the model does not exist or does not fit the devices, the data cannot be read, or a binding
      of the user is wrong.
  """
  from rosetta_t5.plan.estimate import expected_devices
  from rosetta_t5.trained_model import read_model_recipe

  run, checkpoint, statements = read_model_recipe(options.model, options.flags, options.trust_model)
  model, devices = run["model"], expected_devices()
  if model.adapter is not None:
    raise ConfigError(
      f"{options.model} has an adapter: merge it (rosetta-t5 convert {options.model} FOLDER --to hf), "
      "or train it on with the run's own recipe"
    )
  bound = re.search(r"^models\.\w+\.(?:output_)?vocabulary = (.+)$", statements, re.M)
  vocabulary = Code(bound[1] if bound else "%VOCABULARY")
  found = data.measure(model.output_vocabulary, vocabulary)
  wanted = options.metrics or found.metrics
  metrics, monitor = choices.choose_metrics(data.targets, wanted, found.task)
  limit = getattr(model.network_config, "max_length", None)
  given = {"inputs": options.input_length, "targets": options.target_length}
  batch, steps, period = choices.choose_steps(found.train, options, *devices)
  lengths = choices.choose_lengths(found.lengths, given, limit)
  for choice in (lengths, steps):
    if choice.is_noted:
      print(f"note: {choice.name} = {choice.value}: {choice.reason}", file=sys.stderr)
  seeds = [Choice(name, options.seed, "makes it repeatable") for name in ("RANDOM_SEED", SEED)]
  sections = {
    "The model": _model_choices(options, model, checkpoint, devices[1]),
    "The data": [*found.bindings, *([metrics] if data.targets else []), lengths, *_READING],
    "The run": [
      Choice("MODEL_DIR", os.path.abspath(options.out)),
      *(batch, steps, *seeds),
      Choice("train_script.train.relative_steps", Code("%TRAIN_STEPS"), "after the checkpoint's"),
    ],
    "Evaluation and checkpoints": [
      period,
      *choices.evaluation_choices(monitor, found.evaluated, batch.value, period.value),
      *choices.patience_choices(monitor, found.task, options.patience),
    ],
  }
  head = (
    f"# What `rosetta-t5 finetune` chose for {options.model}.\n#\n# Command   python -m t5x.train "
    f"--gin_file={shlex.quote(os.path.join(options.out, 'finetune.gin'))}\n\ninclude 'gin/runs/finetune.gin'\n\n"
    f"# The model, as in {options.model}.\n{statements}\n{_IMPORTS}"
  )
  lines = [head, *(line for name, of in sections.items() for line in _section(name, of))]
  own = [f"include {file!r}" for file in files] + list(bindings)
  own = _section("The command line", own) if own else []
  for candidate in (tried := candidates(options)):
    method = _section("The method", method_lines(candidate, options, model, steps.value))
    text = "\n".join([*lines, *method, *own])
    if memory := _memory_choices(text, devices[1], candidate is tried[-1]):
      break
  return "\n".join([*lines, *method, *_section("Memory", memory), *own, ""])


def _section(name: str, lines: Sequence[Choice | str]) -> list[str]:
  """Returns lines of the gin file below a comment."""
  return [f"\n# {name}.", *map(str, lines)]


def _model_choices(
  options: argparse.Namespace, model: Any, checkpoint: str, device: str
) -> list[Choice]:
  """Returns where the model and its schedule begin, its precision, and its loss."""
  from rosetta_t5.checkpoints import is_hugging_face
  from rosetta_t5.checkpoints.checkpoint_folders import step_of

  precision = options.precision or ("bfloat16" if device == "GPU" else "float32")
  why = "" if options.precision else f"fast on a {device}"
  found = [
    Choice("INITIAL_CHECKPOINT_PATH", checkpoint),
    Choice("utils.RestoreCheckpointConfig.resize_vocabulary", True, "for tokens that were added"),
    Choice(f"network.{type(model.network_config).__name__}.dtype", precision, why),
  ]
  if is_hugging_face(checkpoint) or candidates(options)[0].name != "full":
    text = "a mean over the batch; there is no optimizer's state with another scale"
    found.append(Choice("LOSS_NORMALIZING_FACTOR", "MEAN_PER_TOKEN", text))
  if step := step_of(checkpoint):
    offset = "utils.create_learning_rate_scheduler.step_offset"
    found.append(Choice(offset, step, "the checkpoint's step"))
  if not hasattr(model.network_config, "num_encoder_layers"):
    text = "a decoder reads inputs and targets as one row"
    reader = Code("@seqio.PrefixLMFeatureConverter")
    found.append(Choice(f"models.{type(model).__name__}.feature_converter_cls", reader, text))
  return found


def _memory_choices(text: str, device: str, must_fit: bool) -> list[Choice]:
  """Returns the microbatches and the rematerialization with which a step of a recipe fits.

  Args:
    text: the gin file, without these choices. It is checked as `rosetta-t5 check` does.
    device: "CPU" or "GPU".
    must_fit: whether it is an error that a step does not fit; otherwise the result is then [].

  Raises:
    ValueError: the gin file is wrong, or a step does not fit.
  """
  from rosetta_t5.config.command_line import parse_command_line
  from rosetta_t5.config.configuration import dry_run
  from rosetta_t5.plan.description import Plan
  from rosetta_t5.train import train

  found: list[Choice] = []

  def describe(resolved: Any) -> list[Any]:
    if not resolved.problems.messages:
      found.extend(_fitting_choices(Plan(resolved), device, must_fit))
    return []

  dry_run(parse_command_line(["rosetta-t5", f"--gin_bindings={text}"]), train, describe)
  return found


def _fitting_choices(plan: Any, device: str, must_fit: bool) -> list[Choice]:
  from rosetta_t5.out_of_memory import device_memory
  from rosetta_t5.parallel.data_layout import check_batch_size
  from rosetta_t5.plan.configurations import POLICIES, fewest_microbatches
  from rosetta_t5.plan.memory import StateMemory

  check_batch_size(plan.dataset_cfg.batch_size, plan.mesh)
  work, available = plan.work, device_memory()
  memory = StateMemory.of(plan.state, plan.specs, work)
  policies = POLICIES if hasattr(work.config, "remat_policy") else (work.remat_policy,)
  options = [work.replace(remat_policy=policy) for policy in policies]
  limit = _USABLE[device] * available
  fits = next(filter(None, (fewest_microbatches(each, memory, limit) for each in options)), None)
  if fits is None and not must_fit:
    return []
  if fits is None:
    needed = sum(memory.step(options[-1]).values())
    raise ConfigError(
      f"the model does not fit: a step needs {size_text(needed)} with rematerialization, and a device "
      f"has {size_text(available)}. Use --lora 16, a smaller --batch_size, --input_length or --target_length, or more "
      "devices (--gin.partitioning.PjitPartitioner.mesh=\"{'fsdp': -1}\")"
    )
  used = f"{size_text(sum(memory.step(fits).values()))} of the device's {size_text(available)}"
  found = [Choice("trainer.Trainer.num_microbatches", fits.microbatches, used)]
  if fits.remat_policy != work.remat_policy:
    name = f"network.{type(work.config).__name__}.remat_policy"
    found.append(Choice(name, fits.remat_policy, "computes activations twice, to save memory"))
  return found
