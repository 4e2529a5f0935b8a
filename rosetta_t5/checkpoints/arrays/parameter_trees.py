"""Conversion of parameters between T5X's two parameter trees.

The plain T5 has a name for each layer (`encoder/layers_0/…`), 2-D kernels, and one relative bias per
stack. The scalable T5 stacks its layers on axis 1 (`encoder/encoder/…`), has kernels of shape [embed,
heads, kv], and one bias per layer.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from rosetta_t5.checkpoints.arrays import lazy_arrays
from rosetta_t5.checkpoints.arrays.lazy_arrays import Arrays, StoredArray

EMBEDDING = "target/token_embedder/embedding"
HEAD = "target/decoder/logits_dense/kernel"
ATTENTION_MATRICES = {"q": "query", "k": "key", "v": "value", "o": "out"}
# The layer norms of a layer's blocks, in order.
NORMS = {
  "encoder": ("pre_attention_layer_norm", "pre_mlp_layer_norm"),
  "decoder": (
    "pre_self_attention_layer_norm",
    "pre_cross_attention_layer_norm",
    "pre_mlp_layer_norm",
  ),
}
_LAYER_BIAS = re.compile(r"(.*/(encoder|decoder)/)layers_(\d+)/(relpos_bias/.*)")
# The axis on which T5X stacks layers by default (T5Config.param_scan_axis).
SCAN_AXIS = 1

# Layers of several kinds are stacked by their place in the shortest repeating pattern, `layers_0`, ….
_SCANNED = re.compile(r"(target/(?:.*/)?)(encoder|decoder)/(?:\2|layers)/(?:layers_(\d+)/)?(.+)")
_LAYER = re.compile(r"(target/(?:.*/)?)(encoder|decoder)/layers_(\d+)/(.+)")
_SHARED_BIAS = re.compile(r"(target/(?:.*/)?)(encoder|decoder)/(relpos_bias/.+)")
_HEADS_KERNEL = re.compile(r"target/.*/(query|key|value|out)/kernel")
# The first name of the bias in T5X's scalable T5.
_OLD_BIAS = "relative_posemb/"


def rename_shared_biases(arrays: Mapping[str, Any]) -> dict[str, Any]:
  """Returns `arrays` with a relative bias that only layer 0 has under its stack's name.

  The layers of such a stack share the bias: `encoder/layers_0/relpos_bias` becomes
  `encoder/relpos_bias`.
  """
  matches = [match for name in arrays if (match := _LAYER_BIAS.fullmatch(name))]
  own = {match[2] for match in matches if match[3] != "0"}
  renamed = {match[0]: match[1] + match[4] for match in matches if match[2] not in own}
  return {renamed.get(name, name): array for name, array in arrays.items()}


def has_own_biases(arrays: Mapping[str, Any]) -> bool:
  """Returns whether each layer has a relative bias of its own, as in the scalable T5 and in UMT5."""
  return any(map(_LAYER_BIAS.fullmatch, arrays))


class CheckpointMismatchError(ValueError):
  """A checkpoint belongs to a different model or optimizer."""


def convert_tree(arrays: Arrays, expected: Mapping[str, Any]) -> dict[str, StoredArray]:
  """Returns `arrays` with the parameters under the names and shapes of `expected`, with the same values.

  A parameter that cannot be converted keeps its name and shape, so that a comparison shows it. So does
  the optimizer's state.

  Args:
    arrays: the arrays of a checkpoint, by flat name.
    expected: the model's leaves with `shape`, by flat name.

  Raises:
    CheckpointMismatchError: the layers of the checkpoint have different relative biases where the model has one.
  """
  if _is_same_tree(arrays, expected):
    return dict(arrays)
  unstacked, axis = unstack_layers(arrays), scan_axis(expected)
  converted, used = {}, set()
  for name, leaf in expected.items():
    if sources := _find_sources(name, unstacked, expected):
      parts = [unstacked[source] for source in sources]
      converted[name] = _assemble(name, tuple(leaf.shape), parts, axis)
      used.update(sources)
  return {**{name: array for name, array in unstacked.items() if name not in used}, **converted}


def unstack_layers(arrays: Arrays) -> dict[str, StoredArray]:
  """Returns arrays with a separate name for each layer's part of a parameter (`encoder/layers_0/…`)."""
  unstacked: dict[str, StoredArray] = {}
  axis = scan_axis(arrays)
  for name, array in arrays.items():
    current_name = name.replace(_OLD_BIAS, "relpos_bias/")
    if (match := _SCANNED.fullmatch(current_name)) and array.ndim > axis:
      prefix, side, place, rest = match.groups()
      first, period = int(place or 0), _period(arrays, prefix, side)
      for n in range(array.shape[axis]):
        layer = f"{prefix}{side}/layers_{first + n * period}"
        unstacked[f"{layer}/{rest}"] = lazy_arrays.index_axis(array, axis, n)
    else:
      unstacked[current_name] = array
  return unstacked


def _period(names: Iterable[str], prefix: str, side: str) -> int:
  """Returns the number of layers that are one step of a stack's scan."""
  matches = filter(None, map(_SCANNED.fullmatch, names))
  return max((int(m[3]) + 1 for m in matches if m[3] and (m[1], m[2]) == (prefix, side)), default=1)


def scan_axis(arrays: Mapping[str, Any]) -> int:
  """Returns the axis on which layers are stacked (T5Config.param_scan_axis).

  The shapes of the scales of the norms of whole activations show it.
  """
  embedding = arrays.get(EMBEDDING)
  norms = [
    x for n, x in arrays.items() if n.endswith("_layer_norm/scale") and _SCANNED.fullmatch(n)
  ]
  on_first = any(embedding is not None and x.shape[0] != embedding.shape[1] for x in norms)
  return 0 if on_first else SCAN_AXIS


def to_plain_tree(arrays: Arrays) -> dict[str, StoredArray]:
  """Returns the parameters of `arrays` in the plain tree: separate layers, 2-D attention kernels."""
  plain = unstack_layers({n: x for n, x in arrays.items() if n.startswith("target/")})
  for name, array in plain.items():
    if _HEADS_KERNEL.fullmatch(name) and array.ndim == 3:
      first, second, third = array.shape
      merged = (first * second, third) if "/out/" in name else (first, second * third)
      plain[name] = lazy_arrays.reshape(array, merged)
  return plain


def to_scalable_tree(arrays: Arrays) -> dict[str, StoredArray]:
  """Returns parameters of the plain tree in the scalable tree, with a bias for each layer."""
  expected: dict[str, Any] = {}
  for name, array in arrays.items():
    if not (match := _LAYER.fullmatch(name) or _SHARED_BIAS.fullmatch(name)):
      expected[name] = array
      continue
    side, rest = match[2], match[match.lastindex or 0]
    inner = _shape_by_heads(name, array, arrays, side)
    layers = _num_layers(arrays, "target/", side)
    shape = (*inner[:SCAN_AXIS], layers, *inner[SCAN_AXIS:])
    expected[f"target/{side}/{side}/{rest}"] = jax.ShapeDtypeStruct(shape, array.dtype)
  return convert_tree(arrays, expected)


def _is_same_tree(arrays: Arrays, expected: Mapping[str, Any]) -> bool:
  """Returns whether the parameters have the expected names, and none has to be reshaped."""
  params = {name: leaf for name, leaf in expected.items() if name.startswith("target/")}
  return params.keys() <= arrays.keys() and not any(
    arrays[name].shape != tuple(leaf.shape) and arrays[name].size == math.prod(leaf.shape)
    for name, leaf in params.items()
  )


def _find_sources(name: str, unstacked: Arrays, expected: Iterable[str] = ()) -> list[str]:
  """Returns the names of the stored arrays that make up the model's array `name`, one of `expected`.

  There is one name, or one per layer of a stacked array or of a bias that the layers share. The list
  is empty if an array is missing.
  """
  if name in unstacked:
    return [name]
  if match := _SCANNED.fullmatch(name):
    prefix, side, place, rest = match.groups()
    period = _period(expected, prefix, side)
    layers = range(int(place or 0), _num_layers(unstacked, prefix, side), period)
    sources = [_find_sources(f"{prefix}{side}/layers_{n}/{rest}", unstacked) for n in layers]
    return [source for (source,) in sources] if all(sources) else []
  if match := _SHARED_BIAS.fullmatch(name):
    prefix, side, rest = match.groups()
    pattern = re.compile(rf"{re.escape(prefix)}{side}/layers_\d+/{re.escape(rest)}")
    return sorted(filter(pattern.fullmatch, unstacked))
  if match := _LAYER_BIAS.fullmatch(name):
    shared = f"{match[1]}{match[4]}"
    return [shared] if shared in unstacked else []
  return []


def _num_layers(arrays: Mapping[str, Any], prefix: str, side: str) -> int:
  """Returns the number of layers of a stack whose layers have separate names."""
  matches = filter(None, map(_LAYER.fullmatch, arrays))
  numbers = [int(m[3]) for m in matches if (m[1], m[2]) == (prefix, side)]
  return max(numbers, default=-1) + 1


def _assemble(
  name: str, shape: tuple[int, ...], sources: list[StoredArray], axis: int
) -> StoredArray:
  """Returns the array of the model's `name`; `axis` is the layers' axis of stacked parameters."""
  if _SCANNED.fullmatch(name):
    inner = shape[:axis] + shape[axis + 1 :]
    parts = [_reshape_heads(name, source, inner) for source in sources]
    # Layers of another shape are left as they are, so that the comparison shows them.
    return lazy_arrays.stack(parts, axis) if {part.shape for part in parts} == {inner} else parts[0]
  if len(sources) > 1 and any(np.any(x.get() != sources[0].get()) for x in sources[1:]):
    raise CheckpointMismatchError(
      f"{name} is one relative bias for all layers, but those of the checkpoint's {len(sources)} layers "
      "differ, so it is not a checkpoint of this model. Restore it into a model with one bias per layer: "
      "the scalable T5 (t5x.examples.scalable_t5.network)"
    )
  return _reshape_heads(name, sources[0], shape)


def _reshape_heads(name: str, array: StoredArray, shape: tuple[int, ...]) -> StoredArray:
  """Merges or splits the adjacent axes of heads and head size in an attention kernel."""
  if _HEADS_KERNEL.fullmatch(name) and array.size == math.prod(shape):
    return lazy_arrays.reshape(array, shape)
  return array


def _shape_by_heads(name: str, array: StoredArray, arrays: Arrays, side: str) -> tuple[int, ...]:
  """Returns the shape of a layer's array in the scalable tree, without the layers' axis."""
  if not _HEADS_KERNEL.fullmatch(name) or array.ndim != 2:
    return array.shape
  bias = re.compile(rf"target/{side}/(layers_\d+/)?relpos_bias/rel_embedding")
  heads = next((arrays[n].shape[0] for n in arrays if bias.fullmatch(n)), None)
  if heads is None:  # a decoder without T5's bias, whose stacked kernels are 2-D
    return array.shape
  if "/out/" in name:
    return (heads, array.shape[0] // heads, array.shape[1])
  return (array.shape[0], heads, array.shape[1] // heads)
