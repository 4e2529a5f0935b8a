"""Describes a run for `--dry_run`: data, model, mesh, batch, optimizer, checkpoints, FLOPs, memory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from rosetta_t5.adapters.adapter import AdapterOptimizer
from rosetta_t5.checkpoints import read_start_facts
from rosetta_t5.checkpoints.checkpoint_folders import step_of
from rosetta_t5.config.configuration import ResolvedRun, Rows
from rosetta_t5.config.saved_config import changes_since
from rosetta_t5.parallel.axis_rules import partition_specs_of
from rosetta_t5.parallel.data_layout import check_batch_size, check_row_lengths
from rosetta_t5.parallel.mesh import MODEL_AXIS, PIPELINE_AXIS, count_batch_shards
from rosetta_t5.plan import estimate, workload
from rosetta_t5.plan.activations import TRACED_EXAMPLES, Activations
from rosetta_t5.plan.configurations import GPU, USABLE
from rosetta_t5.plan.inputs import checkpoint_rows, data_rows, find_start
from rosetta_t5.plan.memory import StateMemory, state_bytes
from rosetta_t5.telemetry.console import count_parameters, describe_parameters
from rosetta_t5.telemetry.gpus import GPUS_PER_NODE, Gpu
from rosetta_t5.terminal import format_number, size_text
from rosetta_t5.traced.program import flops_of_segments
from rosetta_t5.training.losses import microbatch_warning
from rosetta_t5.user_errors import reason_of, with_lines

# The learning rate of a run is compared with that of its schedule at these steps, up to nine million.
_SCHEDULE_HORIZON = sorted({int(1.3**n) for n in range(62)})


def describe_run(resolved: ResolvedRun) -> Rows:
  """Returns a description of a resolved run as rows (label, text), and adds to its problems.

  Rows that need an argument that is missing or could not be built are left out.
  """
  rows = [("run", resolved.function_name)] if resolved.function_name else []
  return rows + rows_of_sections(_SECTIONS, Plan(resolved))


def rows_of_sections(sections: Sequence[Callable[[Plan], Rows]], plan: Plan) -> Rows:
  """Returns the rows of all sections. ValueErrors, which a user can fix, become problems of the run."""
  rows: Rows = []
  problems = plan.resolved.problems.messages
  for section in sections:
    try:
      rows += section(plan)
    except ValueError as error:
      text = with_lines(str(error), plan.resolved.program.lines_with(str(error)))
      if text not in problems:
        problems.append(text)
    except Exception as error:
      # The cause may be a missing argument, which is a problem already, or a model with other inputs.
      if not problems:
        plan.resolved.unchecked.append(reason_of(error)[:200])
  return rows


def labeled(label: str, lines: Iterable[str]) -> Rows:
  """Returns a row for each line. Only the first row has the label."""
  return [("" if n else label, line) for n, line in enumerate(lines)]


@dataclasses.dataclass
class Plan:
  """A resolved run, and what follows from it."""

  resolved: ResolvedRun
  gpu: Gpu = GPU

  def __getitem__(self, name: str) -> Any:
    """Returns an argument of the run; None if it is absent."""
    return self.resolved.arguments.get(name)

  @property
  def is_training(self) -> bool:
    """Whether the run trains."""
    return self["trainer_cls"] is not None or self.resolved.function_name == "precompile"

  @property
  def dataset_cfg(self) -> Any:
    """The dataset for training, or else the only one."""
    return self["train_dataset_cfg"] or self["dataset_cfg"]

  @property
  def trainer_settings(self) -> Mapping[str, Any]:
    """The arguments that gin will pass to the trainer."""
    return self.resolved.settings.get("trainer_cls", {})

  @functools.cached_property
  def steps(self) -> tuple[int, int]:
    """The steps at which the run first starts (0 if that is unknown) and ends, also for a restart."""
    path, facts = None, {}
    with contextlib.suppress(ValueError):  # `checkpoint_rows` reports it
      path = find_start(self)[1]
      facts = read_start_facts(self["model_dir"], path)
    start = (step_of(path) if path else None) or 0
    relative = self["relative_steps"]
    end = facts.get("relative_to", start) + relative if relative else self["total_steps"]
    return facts.get("first_step", start), end or 1

  @functools.cached_property
  def lengths(self) -> dict[str, int]:
    """The lengths of the model's inputs; see `input_lengths`."""
    lengths = getattr(self.dataset_cfg, "task_feature_lengths", None)
    return workload.input_lengths(self["model"], lengths)

  @functools.cached_property
  def state(self) -> Any:
    """The shapes of the train state."""
    batch_size = getattr(self.dataset_cfg, "batch_size", 1)
    return workload.state_shapes(self["model"], batch_size, self.lengths, self.is_training)

  @functools.cached_property
  def devices(self) -> tuple[int, str]:
    """The number of devices and their kind, which is "" if the command line states the number."""
    return (self.resolved.devices, "") if self.resolved.devices else estimate.expected_devices()

  @functools.cached_property
  def mesh(self) -> dict[str, int]:
    """The size of each mesh axis."""
    return self["partitioner"].mesh_config.axis_sizes(self.devices[0])

  @functools.cached_property
  def specs(self) -> Any:
    """The train state with a valid PartitionSpec for each array."""
    return partition_specs_of(self["partitioner"], self.state, self.mesh)

  @property
  def microbatches(self) -> int:
    """The number of microbatches that are computed one after another."""
    return self.trainer_settings.get("num_microbatches") or 1

  @property
  def fp8(self) -> bool:
    """Whether the run computes in fp8 on `gpu`."""
    make_config = self["te_config_cls"]
    requested = False if make_config is None else make_config().requested
    return self.gpu.fp8 is not None if requested is None else requested

  @property
  def work(self) -> workload.Workload:
    """What a training step computes."""
    cfg, model = self.dataset_cfg, self["model"]
    kernel = getattr(model.network_config, "attention_kernel", None)
    if kernel == "auto" and self.devices[1] != "CPU":
      kernel = workload.fastest_kernel(model, self.lengths, cfg, self.mesh, self.gpu)
    inputs = (self["partitioner"], cfg.batch_size, self.mesh, self.activations, kernel)
    work = workload.workload_of(model, *inputs)
    return work.replace(microbatches=self.microbatches, fp8=self.fp8 or work.fp8)

  @functools.cached_property
  def activations(self) -> Activations | None:
    """What the model's traced loss keeps; None if it cannot be traced."""
    return workload.traced_activations(self["model"], self["partitioner"], self.state, self.lengths)

  @functools.cached_property
  def flops(self) -> float:
    """The FLOPs of a step on all devices, those of the traced loss if there are `activations`."""
    if self.activations is None:
      of_sequence = 6.0 * count_parameters(self.state.params) * sum(self.lengths.values())
    else:
      of_sequence = flops_of_segments(self.activations.segments) / TRACED_EXAMPLES
    return float(self.dataset_cfg.batch_size * of_sequence)


def _model_rows(plan: Plan) -> Rows:
  model = plan["model"]
  if model is None:
    return []
  module = model.module
  dtype = getattr(model.network_config, "dtype", None)
  text = f"{type(model).__name__} of {type(module).__module__}.{type(module).__name__}, "
  text += describe_parameters(model, plan.state.params)
  return [("model", text + (f", computed in {jnp.dtype(dtype).name}" if dtype else ""))]


def _mesh_rows(plan: Plan) -> Rows:
  if plan["partitioner"] is None:
    return []
  count, kind = plan.devices
  axes = " × ".join(f"{name} {size}" for name, size in plan.mesh.items())
  devices = f"{count} {kind + ' ' if kind else ''}device{'s' * (count > 1)}"
  hint = "" if plan.resolved.devices else " (--devices=N plans for another number)"
  rows = [("mesh", f"{axes} on {devices}{hint}")]
  heads = getattr(getattr(plan["model"], "network_config", None), "num_heads", 0)
  if heads % (shards := plan.mesh.get(MODEL_AXIS, 1)):
    text = f"{heads} heads are not divisible by {shards} (model): each device computes all of them"
    rows.append(("", text))
  if count > GPUS_PER_NODE:
    rows.append(("", estimate.describe_placement(plan.mesh)))
  if plan.is_training and plan.mesh.get(PIPELINE_AXIS, 1) > 1:
    rows.append(("pipeline", str(plan.work.schedule)))
  return rows


def _batch_rows(plan: Plan) -> Rows:
  if plan.dataset_cfg is None:
    return []
  size = plan.dataset_cfg.batch_size
  parts = plan.microbatches * plan.trainer_settings.get("overlapping_parts", 1)
  check_batch_size(size, plan.mesh)
  if plan.is_training and plan["model"]:
    # Where rows cannot be split, predictions are computed for whole rows.
    check_row_lengths(plan.lengths, plan.mesh)
  if size % parts:
    raise ValueError(
      f"the batch size {size} must be a multiple of trainer.Trainer.num_microbatches × overlapping_parts = {parts}: "
      "change one of them"
    )
  text = f"{size} examples, {size / count_batch_shards(plan.mesh):g} per device along data"
  if parts > 1:
    text += f", in {parts} microbatches of {size // parts}"
  factor = getattr(plan["model"], "loss_normalizing_factor", None)
  return labeled("batch", [text, *microbatch_warning(factor, parts if plan.is_training else 1)])


def _optimizer_rows(plan: Plan) -> Rows:
  if not plan.is_training:
    return []
  model = plan["model"]
  optimizer = getattr(model, "optimizer_def", None)
  if model is not None and optimizer is None and plan.resolved.function_name == "train":
    raise ValueError(
      f"{type(model).__name__}.optimizer_def must be an optimizer, got None: set OPTIMIZER"
    )
  rule = optimizer.optimizer if isinstance(optimizer, AdapterOptimizer) else optimizer
  rows = [("optimizer", type(rule).__name__)]
  schedule = plan.trainer_settings.get("learning_rate_fn")
  if schedule is not None:
    first, last = plan.steps
    steps = sorted({first, first + 1, *(first + (last - first) * n // 4 for n in (1, 2, 3, 4))})
    rate = ", ".join(f"{float(schedule(step)):.3g} at {step}" for step in steps)
    if not getattr(optimizer, "uses_learning_rate", True):
      rate += ": only logged, optax optimizers have their own"
    rows.append(("learning rate", rate))
    highest, reached = (max(map(schedule, n)) for n in (steps, _SCHEDULE_HORIZON))
    if highest <= 0.01 * reached:
      text = f"at most {highest:.3g} at these steps, although the schedule reaches {reached:.3g}"
      rows.append(("", f"{text}: check its warm-up and decay against TRAIN_STEPS"))
  return rows


def _step_rows(plan: Plan) -> Rows:
  if not plan.is_training or plan["total_steps"] is None:
    return []
  total = "{} to {}".format(*plan.steps)
  periods = {name: plan[f"{name}_period"] for name in ("stats", "eval")}
  hooks = [f"{name} every {period}" for name, period in periods.items() if period]
  return [("steps", ", ".join([total, *hooks]))]


def _memory_rows(plan: Plan) -> Rows:
  """Returns rows about FLOPs and memory; the last recommends `plan` if a step needs more memory than a GPU has."""
  if plan["model"] is None or plan["partitioner"] is None:
    return []
  if plan.is_training:
    parts = StateMemory.of(plan.state, plan.specs, plan.work).step(plan.work)
  else:
    parts = state_bytes(plan.state, plan.specs, plan.mesh)
  total = sum(parts.values())
  each = ", ".join(f"{name} {size_text(size)}" for name, size in parts.items())
  lines = [f"about {size_text(total)} per device: {each}"]
  if plan.is_training and total > USABLE * GPU.memory:
    lines.append(f"too much for {size_text(GPU.memory)}: `rosetta-t5 plan` finds settings that fit")
  return [*(flops_rows(plan) if plan.is_training else []), *labeled("memory", lines)]


def flops_rows(plan: Plan) -> Rows:
  """Returns the FLOPs of a training step."""
  number = plan.flops
  units = (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6))
  unit, size = next((unit for unit in units if number >= unit[1]), units[-1])
  text = f"{format_number(number / size)} {unit} per step"
  return [("FLOPs", text if plan.activations else f"about {text} (6 per parameter and token)")]


def _change_rows(plan: Plan) -> Rows:
  folder = plan["model_dir"] or plan["output_dir"]
  changes = changes_since(folder, plan.resolved.program) if folder else []
  return labeled("changed", [f"since the last run in {folder}:", *changes]) if changes else []


# The rows about what a training step computes, besides its FLOPs.
STEP_SECTIONS = (_model_rows, _mesh_rows, _batch_rows, _optimizer_rows)
_SECTIONS = (data_rows, *STEP_SECTIONS, _step_rows, checkpoint_rows, _memory_rows, _change_rows)
