"""One model's parameters in another tree: layers stacked by a scan or apart, kernels 2-D or by heads.

T5X's plain T5 has `encoder/layers_0/…`, 2-D kernels and one relative bias a stack. Its scalable T5 has
`encoder/encoder/…` with layers stacked on axis 1, kernels [embed, heads, kv] and a bias a layer.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray, index_axis, reshape, stack

SCAN_AXIS = 1

_log = logging.getLogger(__name__)

_SCANNED = re.compile(r"(.*/)(encoder|decoder)/(?:\2|layers)/(.+)")
_LAYER = re.compile(r"(.*/)(encoder|decoder)/layers_(\d+)/(.+)")
_SHARED_BIAS = re.compile(r"(.*/)(encoder|decoder)/(relpos_bias/.+)")
_BY_HEADS = re.compile(r".*/(query|key|value|out)/kernel(/\w+)?")
# What T5X's scalable T5 called its bias at first.
_OLD_BIAS = "relative_posemb/"
_STATES = "state/param_states/"
_SIDES = ("encoder", "decoder")


class LayoutError(ValueError):
  """A checkpoint's parameters cannot be written in the model's tree without changing the model."""


def convert_layout(
  arrays: Mapping[str, StoredArray], expected: Mapping[str, Any]
) -> dict[str, StoredArray]:
  """Returns `arrays` under the names and shapes of `expected` wherever the values are the same ones.

  What cannot be had so keeps its name and shape, for a comparison to show.

  Args:
    arrays: a checkpoint's, by flat name.
    expected: the model's leaves with `shape`, by flat name.

  Raises:
    LayoutError: layers that are to share a relative bias have different ones.
  """
  if not _differs(arrays, expected):
    return dict(arrays)
  apart = unstack_layers(arrays)
  axis = scan_axis(expected)
  result, used = {}, set()
  for name, leaf in expected.items():
    sources = _sources(name, apart)
    if sources is None:
      continue
    place = _stack_axis(name, leaf, expected, axis) if _SCANNED.fullmatch(name) else None
    result[name] = _assembled(name, leaf, [apart[source] for source in sources], place)
    used.update(sources)
  _log.info("the checkpoint's layers are stored in another tree; they are read into the model's")
  return {**{name: array for name, array in apart.items() if name not in used}, **result}


def is_scanned(names: Any) -> bool:
  """Returns whether some layers are stacked in one array."""
  return any(_SCANNED.fullmatch(name) for name in names)


def unstack_layers(arrays: Mapping[str, StoredArray]) -> dict[str, StoredArray]:
  """Returns arrays with each layer's part under a name of its own (`encoder/layers_0/…`).

  Optimizer state that is not of its parameter's shape cannot be taken apart and keeps its name.
  """
  apart: dict[str, StoredArray] = {}
  axis = scan_axis(arrays)
  for name, array in arrays.items():
    match = _SCANNED.fullmatch(name.replace(_OLD_BIAS, "relpos_bias/"))
    if match is None:
      apart[name.replace(_OLD_BIAS, "relpos_bias/")] = array
      continue
    prefix, side, rest = match.groups()
    if _is_single_zero(name, array) and (parameter := _parameter_of(name, arrays)) is not None:
      for layer in range(parameter.shape[axis]):
        apart[f"{prefix}{side}/layers_{layer}/{rest}"] = array
      continue
    place = _stack_axis(name, array, arrays, axis)
    if place is None:
      apart[name] = array
      continue
    for layer in range(array.shape[place]):
      apart[f"{prefix}{side}/layers_{layer}/{rest}"] = index_axis(array, place, layer)
  return apart


def scan_axis(arrays: Mapping[str, Any]) -> int:
  """Returns the axis that layers are stacked on (T5Config.param_scan_axis), as the norms show it."""
  embedding = arrays.get("target/token_embedder/embedding")
  norms = [x for n, x in arrays.items() if n.endswith("_norm/scale") and _SCANNED.fullmatch(n)]
  on_first = [x for x in norms if embedding is not None and x.shape[0] != embedding.shape[1]]
  return 0 if on_first else SCAN_AXIS


def _stack_axis(name: str, leaf: Any, tree: Mapping[str, Any], axis: int) -> int | None:
  """Returns the axis of a stacked leaf that counts layers; None if there is none to be seen.

  An optimizer's state has its parameter's axes, or some of them, where Adafactor keeps means over the
  others.
  """
  if not name.startswith(_STATES):
    return axis if len(leaf.shape) > axis else None
  parameter = _parameter_of(name, tree)
  if parameter is None:
    return None
  shape, dims = tuple(leaf.shape), tuple(parameter.shape)
  places = {
    kept.index(axis)
    for kept in itertools.combinations(range(len(dims)), len(shape))
    if axis in kept and shape == tuple(dims[dim] for dim in kept)
  }
  return places.pop() if len(places) == 1 else None


def _is_single_zero(name: str, leaf: Any) -> bool:
  """Returns whether a leaf stands for what Adafactor does not keep of a parameter."""
  return name.startswith(_STATES) and math.prod(leaf.shape) == 1


def _parameter_of(name: str, arrays: Mapping[str, Any]) -> Any:
  """Returns the parameter that an optimizer's state belongs to, or None.

  Adafactor's state is `…/PARAMETER/v`, that of optax `…/0/mu/PARAMETER`.
  """
  inner = name.removeprefix(_STATES)
  if (found := arrays.get("target/" + inner.rpartition("/")[0])) is not None:
    return found
  parts = inner.split("/")
  suffixes = ("target/" + "/".join(parts[start:]) for start in range(len(parts)))
  return next((arrays[suffix] for suffix in suffixes if suffix in arrays), None)


def _differs(arrays: Mapping[str, StoredArray], expected: Mapping[str, Any]) -> bool:
  """Returns whether the two trees of parameters differ in names, or in shapes of one size."""
  for name, leaf in expected.items():
    if not name.startswith("target/"):
      continue
    array = arrays.get(name)
    if array is None or (array.shape != tuple(leaf.shape) and array.size == math.prod(leaf.shape)):
      return True
  return False


def _sources(name: str, apart: Mapping[str, StoredArray]) -> list[str] | None:
  """Returns the names in `apart` that make up the model's `name`, one or one a layer; or None."""
  if name in apart:
    return [name]
  if match := _SCANNED.fullmatch(name):
    prefix, side, rest = match.groups()
    layers = _layers_of(apart, prefix, side)
    names = [_layer_source(f"{prefix}{side}/layers_{n}/{rest}", apart) for n in range(layers)]
    return names if names and None not in names else None  # type: ignore[return-value]
  if match := _SHARED_BIAS.fullmatch(name):
    prefix, side, rest = match.groups()
    pattern = re.compile(rf"{re.escape(prefix)}{side}/layers_\d+/{re.escape(rest)}")
    return sorted(filter(pattern.fullmatch, apart)) or None
  source = _layer_source(name, apart)
  return None if source is None else [source]


def _layers_of(apart: Mapping[str, Any], prefix: str, side: str) -> int:
  """Returns how many layers a stack has whose layers have names of their own."""
  matches = (_LAYER.fullmatch(name) for name in apart)
  numbers = [int(m[3]) for m in matches if m and m[1] == prefix and m[2] == side]
  return max(numbers, default=-1) + 1


def _layer_source(name: str, apart: Mapping[str, StoredArray]) -> str | None:
  """Returns the name of a layer's array; that of a bias may be the stack's, which the layers share."""
  if name in apart:
    return name
  match = _LAYER.fullmatch(name)
  if match and match[4].startswith("relpos_bias/"):
    shared = f"{match[1]}{match[2]}/{match[4]}"
    return shared if shared in apart else None
  return None


def _assembled(name: str, leaf: Any, sources: list[StoredArray], axis: int | None) -> StoredArray:
  """Returns the array of the model's `name`; `axis` counts the layers, where it is a stack of them."""
  shape = tuple(leaf.shape)
  if axis is not None:
    inner = shape[:axis] + shape[axis + 1 :]
    parts = [_by_heads(name, source, inner) for source in sources]
    # Layers of another shape stay as they are, for the comparison to show.
    return stack(parts, axis) if {part.shape for part in parts} == {inner} else parts[0]
  if len(sources) > 1 and not _is_single_zero(name, leaf):
    _require_equal(name, sources)
  return _by_heads(name, sources[0], shape)


def _by_heads(name: str, array: StoredArray, shape: tuple[int, ...]) -> StoredArray:
  """Joins or parts the axes of heads and head size, which are next to each other."""
  if _BY_HEADS.fullmatch(name) and array.size == math.prod(shape):
    return reshape(array, shape)
  return array


def _require_equal(name: str, biases: list[StoredArray]) -> None:
  if not name.startswith("target/"):
    return
  first = biases[0].get()
  differing = [i for i, bias in enumerate(biases) if not np.array_equal(bias.get(), first)]
  if differing:
    raise LayoutError(
      f"{name} is one relative bias for all layers, but the checkpoint has {len(biases)} that differ "
      f"(layer {differing[0]} from layer 0): a model that shares them is another model. Restore it "
      "into one with a bias a layer: the scalable T5 (t5x.examples.scalable_t5.network)"
    )


def to_plain_tree(arrays: Mapping[str, StoredArray]) -> dict[str, StoredArray]:
  """Returns parameters in the plain tree: layers apart, attention kernels 2-D.

  Names that are no parameters are left out.
  """
  apart = unstack_layers({n: x for n, x in arrays.items() if n.startswith("target/")})
  for name, array in apart.items():
    if _BY_HEADS.fullmatch(name) and array.ndim == 3:
      first, second, third = array.shape
      joined = (first * second, third) if "/out/" in name else (first, second * third)
      apart[name] = reshape(array, joined)
  return apart


def to_scalable_tree(arrays: Mapping[str, StoredArray]) -> dict[str, StoredArray]:
  """Returns parameters of the plain tree in that of T5X's scalable T5; biases become the layers' own."""
  expected: dict[str, Any] = {}
  layers = {side: _layers_of(arrays, "target/", side) for side in _SIDES}
  for name, array in arrays.items():
    match = _LAYER.fullmatch(name)
    shared = _SHARED_BIAS.fullmatch(name)
    if match is None and shared is None:
      expected[name] = array
      continue
    side, rest = (match[2], match[4]) if match else (shared[2], shared[3])  # type: ignore[index]
    inner = _shape_by_heads(name, array, arrays, side)
    shape = (*inner[:SCAN_AXIS], layers[side], *inner[SCAN_AXIS:])
    expected[f"target/{side}/{side}/{rest}"] = np.broadcast_to(np.zeros((), array.dtype), shape)
  return convert_layout(arrays, expected)


def _shape_by_heads(
  name: str, array: StoredArray, arrays: Mapping[str, StoredArray], side: str
) -> tuple[int, ...]:
  if not _BY_HEADS.fullmatch(name) or array.ndim != 2:
    return array.shape
  bias = re.compile(rf"target/{side}/(layers_\d+/)?relpos_bias/rel_embedding")
  heads = next((arrays[n].shape[0] for n in arrays if bias.fullmatch(n)), None)
  if heads is None:  # a decoder without T5's bias, whose scan keeps kernels 2-D
    return array.shape
  if "/out/" in name:
    return (heads, array.shape[0] // heads, array.shape[1])
  return (array.shape[0], heads, array.shape[1] // heads)
