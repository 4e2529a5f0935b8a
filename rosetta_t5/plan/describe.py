"""The rows that `--dry_run` prints: task, model, mesh, batch, optimizer, checkpoints, FLOPs, memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from rosetta_t5.config import ResolvedRun, changes_since
from rosetta_t5.config.language.statements import Macro, Reference, leaves
from rosetta_t5.parallel.data_layout import check_batch_size
from rosetta_t5.parallel.mesh import batch_shards
from rosetta_t5.parallel.mesh_axes import MODEL_AXIS
from rosetta_t5.parallel.partition_specs import check_partition_specs
from rosetta_t5.plan import fitting, memory, start
from rosetta_t5.plan.collectives import Work, split_over_model
from rosetta_t5.plan.data import data_rows
from rosetta_t5.plan.devices import expected_devices
from rosetta_t5.plan.estimate import step_memory
from rosetta_t5.plan.shapes import input_lengths, state_shapes
from rosetta_t5.telemetry.flops import flops_of_lengths
from rosetta_t5.telemetry.model_info import count_parameters

Rows = list[tuple[str, str]]


def describe_run(resolved: ResolvedRun) -> Rows:
  """Returns what a resolved run is, a row a subject, and adds to its problems what does not fit.

  Each row is made from what could be built; where something is missing, its row is left out.
  """
  rows: Rows = [("run", resolved.run)] if resolved.run else []
  plan = Plan(resolved)
  for part in _PARTS:
    rows += told(part, plan)
  return rows


def describe_costs() -> tuple[Callable[[Plan], Rows], ...]:
  """Returns the parts that say what a training step works on, for `rosetta-t5 plan`."""
  return (_model, _mesh, _batch, _optimizer, _flops)


def told(part: Callable[[Plan], Rows], plan: Plan) -> Rows:
  """Returns the rows of a part; a ValueError is the user's to mend, and becomes a problem."""
  problems = plan.resolved.problems.messages
  try:
    return part(plan)
  except ValueError as error:
    if str(error) not in problems:
      problems.append(str(error))
  except Exception as error:
    # A model with inputs of its own, say; or an argument is lacking, which has been told.
    if not problems:
      return [("not told", f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")]
  return []


@dataclasses.dataclass
class Plan:
  """A resolved run, and what follows from it: made when first asked for."""

  resolved: ResolvedRun

  def __getitem__(self, name: str) -> Any:
    """An argument of the run, or None."""
    return self.resolved.arguments.get(name)

  @property
  def is_training(self) -> bool:
    """Whether the run updates parameters."""
    return self["trainer_cls"] is not None or self.resolved.run == "precompile"

  @property
  def dataset_cfg(self) -> Any:
    """The data whose batches the model sees most."""
    return self["train_dataset_cfg"] or self["dataset_cfg"]

  @functools.cached_property
  def lengths(self) -> dict[str, int]:
    """How long the model's inputs are."""
    return input_lengths(self["model"], getattr(self.dataset_cfg, "task_feature_lengths", None))

  @functools.cached_property
  def state(self) -> Any:
    """The train state's shapes."""
    batch_size = getattr(self.dataset_cfg, "batch_size", 1)
    return state_shapes(self["model"], batch_size, self.lengths, self.is_training)

  @functools.cached_property
  def devices(self) -> tuple[int, str]:
    """How many devices there will be, and of what kind."""
    count, kind = expected_devices()
    return (self.resolved.devices, "") if self.resolved.devices else (count, kind)

  @functools.cached_property
  def mesh(self) -> dict[str, int]:
    """The size of each mesh axis."""
    return self["partitioner"].mesh_shape(self.devices[0])

  @functools.cached_property
  def splits(self) -> Any:
    """The train state with a PartitionSpec for each array, all of which can be split so."""
    splits = self["partitioner"].get_mesh_axes(self.state)
    check_partition_specs(self.state, splits, self.mesh)
    return splits

  @property
  def microbatches(self) -> int:
    """The parts that a batch is worked through in."""
    return self.resolved.settings.get("trainer_cls", {}).get("num_microbatches") or 1

  @property
  def work(self) -> Work:
    """What a training step works on."""
    return Work(
      config=getattr(getattr(self["model"], "module", None), "config", None),
      lengths=self.lengths,
      examples=self.dataset_cfg.batch_size / batch_shards(self.mesh),
      microbatches=self.microbatches,
      zero1=getattr(self["partitioner"], "zero1", False),
      over_model=split_over_model(self["partitioner"]),
      loss_chunk_length=getattr(self["model"], "_loss_chunk_length", None),
    )

  @property
  def has_flops_formula(self) -> bool:
    """Whether FLOPs are counted by T5X's formula, or estimated from the parameters."""
    return flops_of_lengths(self.work.config, self.lengths) is not None

  @property
  def flops(self) -> float:
    """Floating-point operations of a training step, on all devices together."""
    size, lengths = self.dataset_cfg.batch_size, self.lengths
    of_sequence = flops_of_lengths(self.work.config, lengths)
    if of_sequence is None:
      of_sequence = 6.0 * count_parameters(self.state.params) * sum(lengths.values())
    return size * of_sequence


def _model(plan: Plan) -> Rows:
  model = plan["model"]
  if model is None:
    return []
  module = getattr(model, "module", None)
  dtype = getattr(getattr(module, "config", None), "dtype", None)
  text = f"{type(model).__name__} of {type(module).__module__}.{type(module).__name__}, "
  text += f"{count_parameters(plan.state.params):,} parameters"
  return [("model", text + (f", computed in {jnp.dtype(dtype).name}" if dtype else ""))]


def _mesh(plan: Plan) -> Rows:
  if plan["partitioner"] is None:
    return []
  count, kind = plan.devices
  axes = " × ".join(f"{name} {size}" for name, size in plan.mesh.items())
  what = f"{count} {kind + ' ' if kind else ''}device{'s' * (count > 1)}"
  hint = "" if plan.resolved.devices else " (--devices=N plans for others)"
  return [("mesh", f"{axes} on {what}{hint}"), *_whole_heads(plan)]


def _whole_heads(plan: Plan) -> Rows:
  """Says where attention is not split: parameters are, but the heads do not come out even."""
  heads, parts = getattr(plan.work.config, "num_heads", 0), plan.mesh.get(MODEL_AXIS, 1)
  if heads % parts == 0:
    return []
  possible = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
  text = f"{heads} heads do not go into model {parts}: each device computes all of them ({possible} would split)"
  return [("", text)]


def _batch(plan: Plan) -> Rows:
  if plan.dataset_cfg is None:
    return []
  size, parts = plan.dataset_cfg.batch_size, plan.microbatches
  check_batch_size(size, plan.mesh)
  if size % parts:
    raise ValueError(
      f"trainer.Trainer.num_microbatches = {parts} does not divide the batch of {size} examples: "
      "change one of the two"
    )
  text = f"{size} examples, {size / batch_shards(plan.mesh):g} a device along data"
  if parts > 1:
    text += f", in {parts} microbatches of {size // parts}"
  return [("batch", text)]


def _optimizer(plan: Plan) -> Rows:
  if not plan.is_training:
    return []
  optimizer = getattr(plan["model"], "optimizer_def", None)
  rows = [("optimizer", _made_of("OPTIMIZER", plan) or type(optimizer).__name__)]
  schedule = plan.resolved.settings.get("trainer_cls", {}).get("learning_rate_fn")
  if schedule is not None:
    rate = _rates(schedule, plan["total_steps"])
    if not getattr(optimizer, "uses_learning_rate", True):
      rate += ": only logged, optax optimizers follow their own"
    rows.append(("learning rate", rate))
  return rows


def _rates(schedule: Callable[[int], Any], total_steps: int | None) -> str:
  last = total_steps or 1
  steps = sorted({0, 1, *(last * n // 4 for n in (1, 2, 3, 4))})
  return ", ".join(f"{float(schedule(step)):.3g} at {step}" for step in steps)


def _made_of(macro: str, plan: Plan) -> str:
  """What gin files make a macro of: `Adafactor`, or `chain(clip_by_global_norm, adamw)`."""
  in_force = plan.resolved.program.effective_bindings()
  found = in_force.get((macro,))
  return ", ".join(_reference_texts(found.value, in_force)) if found else ""


def _reference_texts(value: Any, in_force: Mapping[tuple[str, ...], Any]) -> Iterator[str]:
  for leaf in leaves(value):
    if isinstance(leaf, Macro) and (leaf.name,) in in_force:
      yield from _reference_texts(in_force[leaf.name,].value, in_force)
    if isinstance(leaf, Reference):
      name = leaf.name.rsplit("/", 1)[-1].rsplit(".", 1)[-1]
      parts = in_force.get(("", name, "transformations"))
      inner = ", ".join(_reference_texts(parts.value, in_force)) if parts else ""
      yield f"{name}({inner})" if inner else name


def _steps(plan: Plan) -> Rows:
  if not plan.is_training:
    return []
  if plan["total_steps"] is None:
    return []
  relative = plan["relative_steps"]
  total = f"{relative} from the start on" if relative else f"to {plan['total_steps']}"
  periods = [
    f"{name} every {plan[f'{name}_period']}" for name in ("stats", "eval") if plan[f"{name}_period"]
  ]
  return [("steps", ", ".join([total, *periods]))]


def _costs(plan: Plan) -> Rows:
  if plan["model"] is None or plan["partitioner"] is None:
    return []
  if plan.is_training:
    parts = step_memory(plan.state, plan.splits, plan.mesh, plan.work)
  else:
    parts = dict(memory.state_bytes(plan.state, plan.splits, plan.mesh))
  total = memory.size_text(sum(parts.values()))
  each = ", ".join(f"{name} {memory.size_text(size)}" for name, size in parts.items())
  rows = _flops(plan) if plan.is_training else []
  return [*rows, ("memory", f"about {total} a device: {each}")]


def _to_fit(plan: Plan) -> Rows:
  """What to set where that is more than a GPU has."""
  if not plan.is_training or plan["model"] is None or plan["partitioner"] is None:
    return []
  lines = fitting.advice(plan.state, plan.splits, plan.mesh, plan.work)
  label = f"for {memory.size_text(fitting.GPU.memory)}"
  return [(label if n == 0 else "", line) for n, line in enumerate(lines)]


def _flops(plan: Plan) -> Rows:
  if plan.has_flops_formula:
    return [("FLOPs", f"{_flop_text(plan.flops)} a step")]
  return [("FLOPs", f"about {_flop_text(plan.flops)} a step (6 a parameter and token)")]


def _flop_text(number: float) -> str:
  for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
    if number >= size:
      return f"{number / size:,.4g} {unit}"
  return f"{number / 1e6:,.4g} MFLOP"


def _changes(plan: Plan) -> Rows:
  folder = plan["model_dir"] or plan["output_dir"]
  if not folder:
    return []
  changes = changes_since(folder, plan.resolved.program)
  if not changes:
    return []
  return [("changed", f"since the last run in {folder}:"), *(("", change) for change in changes)]


_PARTS = (
  data_rows,
  _model,
  _mesh,
  _batch,
  _optimizer,
  _steps,
  start.rows,
  _costs,
  _to_fit,
  _changes,
)
