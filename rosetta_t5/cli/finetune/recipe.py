"""Makes the gin file of `rosetta-t5 finetune`: the model, and the choices with their reasons."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rosetta_t5.cli.finetune import choices
from rosetta_t5.cli.finetune.choices import Choice, Code
from rosetta_t5.user_errors import ConfigError

RATE = "utils.create_learning_rate_scheduler.base_learning_rate"
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
# What arrays may use of a CPU's memory, which other programs use too, and of a GPU's.
_USABLE = {"CPU": 0.5, "GPU": 0.9}


def make_recipe(
  options: argparse.Namespace, data: Any, files: Sequence[str], bindings: Sequence[str]
) -> tuple[str, str]:
  """Returns the gin file, and the value by which checkpoints are compared, as RUN/TAG.

  Args:
    options: the values of the command's arguments.
    data: a `rows.Files` or `rows.Tasks`.
    files: gin files of the user, which are included at the end.
    bindings: gin statements of the user, which come last.

  Raises:
    ValueError: the model does not exist or does not fit the devices, or the data cannot be read.
  """
  from rosetta_t5.plan.estimate import expected_devices
  from rosetta_t5.trained_model import read_model_recipe

  run, checkpoint, statements = read_model_recipe(options.model, options.trusts_model)
  model, devices = run["model"], expected_devices()
  bound = re.search(r"^models\.\w+\.(?:output_)?vocabulary = (.+)$", statements, re.M)
  vocabulary = Code(bound[1] if bound else "%VOCABULARY")
  found = data.measure(model.output_vocabulary)
  metrics, monitor = choices.choose_metrics(data.targets, options.metrics, found.task)
  limit = getattr(model.network_config, "max_length", None)
  given = {"inputs": options.input_length, "targets": options.target_length}
  lengths = choices.choose_lengths(found.lengths, given, limit)
  batch, steps, period = choices.choose_steps(found.train, options, *devices)
  seeds = [Choice(name, options.seed, "makes it repeatable") for name in ("RANDOM_SEED", SEED)]
  sections = {
    "The model and the method": [
      *_model_choices(options, model, checkpoint, devices[1]),
      *_memory_choices(run, lengths.value, batch.value, options, devices),
    ],
    "The data": [*data.choices(found, vocabulary, metrics), lengths, *_reading_choices()],
    "The run": [
      Choice("MODEL_DIR", os.path.abspath(options.out), ""),
      *(batch, steps),
      Choice("train_script.train.relative_steps", Code("%TRAIN_STEPS"), "after the checkpoint's"),
      *seeds,
    ],
    "Evaluation and checkpoints": [
      period,
      *choices.evaluation_choices(monitor, found.evaluated, batch.value, period.value),
      *choices.patience_choices(monitor, found.task, options.patience),
    ],
  }
  lines = [f"include {file!r}" for file in files] + list(bindings)
  return _gin_file(options, statements, sections, lines), f"{monitor.folder}/{monitor.name}"


def _model_choices(
  options: argparse.Namespace, model: Any, checkpoint: str, device: str
) -> list[Choice]:
  """Returns where the model begins, its precision, and how its parameters are trained."""
  from rosetta_t5.checkpoints import is_hugging_face

  config, model_class = type(model.network_config).__name__, type(model).__name__
  found = [
    Choice("INITIAL_CHECKPOINT_PATH", checkpoint, ""),
    Choice("utils.RestoreCheckpointConfig.resize_vocabulary", True, "for tokens that were added"),
    Choice(f"network.{config}.dtype", *_precision(options, device)),
  ]
  is_folder, rate, reason = is_hugging_face(checkpoint), 1e-3, "T5's, for Adafactor"
  if is_folder:
    text = "a mean over the batch; there is no optimizer's state with another scale"
    found.append(Choice("LOSS_NORMALIZING_FACTOR", "MEAN_PER_TOKEN", text))
  elif "Adafactor" not in type(model.optimizer_def).__name__:
    rate, reason = 1e-4, "for the optimizer of the run that the checkpoint is of"
  if not hasattr(model.network_config, "num_encoder_layers"):
    text = "a decoder reads inputs and targets as one row"
    reader = Code("@seqio.PrefixLMFeatureConverter")
    found.append(Choice(f"models.{model_class}.feature_converter_cls", reader, text))
  given = options.learning_rate
  return [
    *found,
    Choice(RATE, given or rate, "" if given else f"{reason}; all parameters are trained"),
  ]


def _precision(options: argparse.Namespace, device: str) -> tuple[str, str]:
  if options.precision:
    return options.precision, ""
  return ("bfloat16", "fast on GPUs") if device == "GPU" else ("float32", "fast on CPUs")


def _reading_choices() -> list[Choice]:
  uses = ("train", "train_eval")
  packed = [
    Choice(f"{use}/utils.DatasetConfig.pack", False, "a row is an example, so steps are epochs")
    for use in uses
  ]
  return [Choice("USE_CACHED_TASKS", False, ""), *packed]


def _memory_choices(
  run: Mapping[str, Any],
  lengths: Mapping[str, int],
  batch: int,
  options: argparse.Namespace,
  devices: tuple[int, str],
) -> list[Choice]:
  """Returns the microbatches and the rematerialization with which a step fits, by `plan`'s estimate.

  Raises:
    ValueError: none fits.
  """
  from rosetta_t5.out_of_memory import device_memory
  from rosetta_t5.parallel.axis_rules import partition_specs_of
  from rosetta_t5.plan.configurations import POLICIES, fewest_microbatches
  from rosetta_t5.plan.memory import StateMemory, size_text
  from rosetta_t5.plan.workload import batch_workload, input_lengths, state_shapes
  from rosetta_t5.traced.program import with_config

  model, partitioner = run["model"], run["partitioner"]
  model = with_config(model, dtype=_precision(options, devices[1])[0])
  mesh = partitioner.mesh_config.axis_sizes(devices[0])
  sides = input_lengths(model, lengths)
  state = state_shapes(model, batch, sides, trained=True)
  names = {"encoder": "encoder_input_tokens", "decoder": "decoder_target_tokens"}
  shapes = {names[side]: (batch, length) for side, length in sides.items()}
  work = batch_workload(model, partitioner, shapes, mesh, state=state)
  memory = StateMemory.of(state, partition_specs_of(partitioner, state, mesh), work)
  available = device_memory()
  limit = _USABLE[devices[1]] * available
  policies = POLICIES if hasattr(model.network_config, "remat_policy") else (work.policy,)
  tried = (fewest_microbatches(work.replace(remat_policy=p), memory, limit) for p in policies)
  fits = next(filter(None, tried), None)
  if fits is None:
    needed = sum(memory.step(work.replace(remat_policy=policies[-1])).values())
    raise ConfigError(
      f"{options.model} does not fit: a step needs {size_text(needed)} with rematerialization, and a device "
      f"has {size_text(available)}. Use a smaller --batch_size, --input_length or --target_length, or more "
      "devices (--gin.partitioning.PjitPartitioner.mesh=\"{'fsdp': -1}\")"
    )
  text = f"{size_text(sum(memory.step(fits).values()))} of the device's {size_text(available)}"
  found = [Choice("trainer.Trainer.num_microbatches", fits.microbatches, text)]
  if fits.policy != work.policy:
    name = f"network.{type(model.network_config).__name__}.remat_policy"
    found.append(Choice(name, fits.policy, "computes activations twice, to save memory"))
  return found


def _gin_file(
  options: argparse.Namespace,
  statements: str,
  sections: Mapping[str, Sequence[Choice]],
  given: Sequence[str],
) -> str:
  parts = [
    f"# What `rosetta-t5 finetune` chose for {options.model}.\n#\n# Command   python -m t5x.train "
    f"--gin_file={os.path.join(options.out, 'finetune.gin')}",
    "include 'gin/runs/finetune.gin'",
    f"# The model, as in {options.model}.\n{statements}",
    _IMPORTS.strip(),
    *("\n".join([f"# {name}.", *map(str, found)]) for name, found in sections.items()),
  ]
  if given:
    parts.append("\n".join(["# The command line.", *given]))
  return "\n\n".join(parts) + "\n"
