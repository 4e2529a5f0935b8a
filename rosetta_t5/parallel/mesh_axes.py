"""The names of the mesh axes, and their sizes from counts such as {"data": 4, "fsdp": 8, "tensor": 2}."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from rosetta_t5.argument_types import near_hint

PIPELINE_AXIS = "pipeline"
DATA_AXIS = "data"
EXPERT_AXIS = "expert"
FSDP_AXIS = "fsdp"
CONTEXT_AXIS = "context"
MODEL_AXIS = "model"
# The mesh axes that a batch is split over, in the order in which they split its rows.
BATCH_AXES = (PIPELINE_AXIS, EXPERT_AXIS, DATA_AXIS, FSDP_AXIS)
# Those whose devices compute other tokens with the same parameters, so that gradients are summed.
TOKEN_AXES = (*BATCH_AXES, CONTEXT_AXIS)
# The axes that a mesh has only if a user's setting names them.
OPTIONAL_AXES = (PIPELINE_AXIS, EXPERT_AXIS, CONTEXT_AXIS)
# User's name → mesh axis, outermost first. Tensor parallelism keeps T5X's name for the mesh axis,
# `model`, which users' axis rules and models refer to.
_AXES = {
  "pipeline": PIPELINE_AXIS,
  "data": DATA_AXIS,
  "expert": EXPERT_AXIS,
  "fsdp": FSDP_AXIS,
  "context": CONTEXT_AXIS,
  "tensor": MODEL_AXIS,
}
# Other names that people use for them.
_ALSO_CALLED = {
  "pp": "pipeline",
  "dp": "data",
  "ddp": "data",
  "ep": "expert",
  "zero": "fsdp",
  "cp": "context",
  "sp": "context",
  "tp": "tensor",
  "mp": "tensor",
  MODEL_AXIS: "tensor",
}
_SETTING = "partitioning.PjitPartitioner.mesh"
_MAX_SUGGESTIONS = 4


def count_batch_shards(axis_sizes: Mapping[str, int]) -> int:
  """Returns how many parts a batch is split into, over the axes `BATCH_AXES`."""
  return math.prod(axis_sizes.get(axis, 1) for axis in BATCH_AXES)


def axis_names(entry: str | Sequence[str] | None) -> tuple[str, ...]:
  """Returns the mesh axes in an entry of a PartitionSpec, which is None, one name or several."""
  return (entry,) if isinstance(entry, str) else tuple(entry or ())


def sizes_from_counts(
  counts: Mapping[str, int], num_devices: int, order: Sequence[str] = ()
) -> dict[str, int]:
  """Returns the sizes of the mesh axes, outermost first; the axis of `tensor` is called `model`.

  The axes `pipeline`, `expert` and `context` exist only if the counts have them.

  Args:
    counts: the size of each axis by name (pipeline, data, expert, fsdp, context, tensor). One of them may
      be -1, which means all remaining devices; so is `data` by default. The others are 1 by default.
    num_devices: the number of devices.
    order: the names of the outermost axes. The others follow in the order above.

  Raises:
    ValueError: a name is unknown or given twice, or the counts do not match the number of devices.
  """
  _check_counts(counts)
  if not set(order) <= set(_AXES) or len(set(order)) < len(order):
    raise ValueError(
      f"{_SETTING}_order must be different axes among {', '.join(_AXES)}, got {tuple(order)}"
    )
  data_default = 1 if -1 in counts.values() else -1
  wanted = {
    name: counts.get(name, data_default if name == "data" else 1)
    for name in dict.fromkeys((*order, *_AXES))
    if name not in OPTIONAL_AXES or name in counts
  }
  given = abs(math.prod(wanted.values()))
  is_open = -1 in wanted.values()
  if num_devices % given or (not is_open and given != num_devices):
    what = "a multiple of " if is_open else ""
    raise ValueError(
      f"{_SETTING} = {dict(counts)} needs {what}{given} devices, but there are {num_devices}. "
      f"Possible meshes: {'; '.join(_suggest_counts(wanted, num_devices))}"
    )
  return {
    _AXES[name]: num_devices // given if size == -1 else size for name, size in wanted.items()
  }


def _check_counts(counts: Mapping[str, int]) -> None:
  for name, size in counts.items():
    if name not in _AXES:
      meant = _ALSO_CALLED.get(str(name).lower(), str(name))
      raise ValueError(
        f"{_SETTING} = {dict(counts)} has an unknown axis {name!r}{near_hint(meant, _AXES, 0.5)}. The "
        f"axes must be among {', '.join(_AXES)}."
      )
    if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
      raise ValueError(
        f"{_SETTING} = {dict(counts)}: the size of {name!r} must be a positive integer, or -1 for all "
        f"remaining devices, got {size!r}"
      )
  if list(counts.values()).count(-1) > 1:
    raise ValueError(f"{_SETTING} = {dict(counts)}: only one axis may be -1")


def _suggest_counts(wanted: Mapping[str, int], num_devices: int) -> list[str]:
  """Returns meshes of `num_devices` devices, those closest to the wanted one first."""
  meshes = [
    dict(zip(wanted, (first, *others), strict=True))
    for *others, first in _factorizations(num_devices, len(wanted))
  ]

  def distance(mesh: Mapping[str, int]) -> float:
    return sum(abs(math.log2(mesh[n] / size)) for n, size in wanted.items() if size != -1)

  return [str(mesh) for mesh in sorted(meshes, key=distance)[:_MAX_SUGGESTIONS]]


def _factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
  """Yields the tuples of `count` factors whose product is `number`."""
  if count == 1:
    yield (number,)
    return
  for factor in range(1, number + 1):
    if number % factor == 0:
      yield from ((factor, *others) for others in _factorizations(number // factor, count - 1))
