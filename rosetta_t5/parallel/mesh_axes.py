"""A mesh by plain counts: {"data": 4, "fsdp": 8, "tensor": 2}."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping

DATA_AXIS = "data"
FSDP_AXIS = "fsdp"
MODEL_AXIS = "model"
# By the user's name, the mesh axis; outermost first. Tensor parallelism keeps T5X's name, `model`,
# which rules and models of one's own speak of.
_AXES = {"data": DATA_AXIS, "fsdp": FSDP_AXIS, "tensor": MODEL_AXIS}
_WHERE = "partitioning.PjitPartitioner.mesh"
_MOST_SHOWN = 4


def axis_sizes(counts: Mapping[str, int], num_devices: int) -> dict[str, int]:
  """Returns the size of each mesh axis: `data`, `fsdp` and `model`, which is what `tensor` counts.

  Args:
    counts: by name (data, fsdp, tensor) how many devices an axis has. One of them may be -1: what the
      others leave. `data` left out is that too; `fsdp` and `tensor` left out are 1.
    num_devices: how many devices there are.

  Raises:
    ValueError: a name is unknown, or the counts do not make up the devices.
  """
  _check_names(counts)
  wanted = {name: counts.get(name, -1 if name == "data" else 1) for name in _AXES}
  if "data" not in counts and -1 in counts.values():
    wanted["data"] = 1
  open_names = [name for name, size in wanted.items() if size == -1]
  given = abs(math.prod(wanted.values()))
  if len(open_names) > 1 or num_devices % given or (not open_names and given != num_devices):
    raise ValueError(_impossible(counts, wanted, given, num_devices))
  sizes = {name: num_devices // given if size == -1 else size for name, size in wanted.items()}
  return {_AXES[name]: size for name, size in sizes.items()}


def _check_names(counts: Mapping[str, int]) -> None:
  for name, size in counts.items():
    if name not in _AXES:
      near = difflib.get_close_matches(name, _AXES, 1, cutoff=0.5)
      hint = f" (did you mean {near[0]!r}?)" if near else ""
      model = " (T5X's axis `model` is counted by 'tensor')" if name == MODEL_AXIS else ""
      raise ValueError(
        f"{_WHERE} = {dict(counts)} has the axis {name!r}{hint}{model}: the axes are {', '.join(_AXES)}"
      )
    if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
      raise ValueError(
        f"{_WHERE} = {dict(counts)} gives {name!r} the size {size!r}: a size is a whole number from 1 "
        "on, or -1 for what the other axes leave"
      )


def _impossible(
  counts: Mapping[str, int], wanted: Mapping[str, int], given: int, num_devices: int
) -> str:
  if list(counts.values()).count(-1) > 1:
    return f"{_WHERE} = {dict(counts)} leaves more than one axis open: only one may be -1"
  what = "needs" if -1 not in wanted.values() else "needs a multiple of"
  return (
    f"{_WHERE} = {dict(counts)} {what} {given} devices, but there are {num_devices}. Possible would be "
    f"{'; '.join(_near(wanted, num_devices))}"
  )


def _near(wanted: Mapping[str, int], num_devices: int) -> list[str]:
  """Returns meshes of so many devices, those first that change what was asked for least."""
  divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
  meshes = [
    {"data": num_devices // fsdp // tensor, "fsdp": fsdp, "tensor": tensor}
    for fsdp in divisors
    for tensor in divisors
    if num_devices % (fsdp * tensor) == 0
  ]

  def distance(mesh: Mapping[str, int]) -> float:
    changes = [math.log2(mesh[n] / size) for n, size in wanted.items() if size != -1]
    return sum(map(abs, changes))

  return [str(mesh) for mesh in sorted(meshes, key=distance)[:_MOST_SHOWN]]
