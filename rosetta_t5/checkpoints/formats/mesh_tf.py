"""Reads Mesh TensorFlow's T5 checkpoints under T5X's names (T5X's `checkpoint_importer`)."""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from etils import epath

from rosetta_t5.checkpoints.arrays import parameter_trees
from rosetta_t5.checkpoints.arrays.lazy_arrays import LazyArray, LazyThreadPoolArray

Rule = Callable[..., tuple[str | None, Any]]

# Suffixes of the variables that hold Adafactor's state.
_SLOTS = {"_slot_vc": "v_col", "_slot_vr": "v_row", "_slot_v": "v"}
# `transformer` is the name of a decoder without an encoder.
_NORMS = {
  **parameter_trees.NORMS,
  "transformer": ("pre_self_attention_layer_norm", "pre_mlp_layer_norm"),
}
_SIDES = "(encoder|decoder|transformer)"
_LAYERS = _SIDES + r"/block_(\d+)"


class CheckpointTranslator:
  """Renames the entries of a flat dict by rules; every entry must match one (T5X's class).

  Attributes:
    rules: (compiled pattern, function) pairs. The first pattern that matches is used.
  """

  def __init__(self) -> None:
    """Creates a translator without rules."""
    self.rules: list[tuple[re.Pattern[str], Rule]] = []

  def add(self, pattern: str) -> Callable[[Rule], Rule]:
    """Returns a decorator that adds `fn(opts, key, value, *groups) -> (new key or None, value)`.

    Args:
      pattern: matches whole keys; its groups are passed to the function.
    """

    def register(fn: Rule) -> Rule:
      self.rules.append((re.compile(pattern + "$"), fn))
      return fn

    return register

  def apply(self, flatdict: Mapping[str, Any], **opts: Any) -> dict[str, Any]:
    """Returns `flatdict` under the new names, without the entries that a rule renames to None.

    Args:
      flatdict: values by name.
      **opts: passed to the rules as a dict.

    Raises:
      ValueError: some names match no rule.
    """
    renamed: list[tuple[str | None, Any]] = []
    unmatched = []
    for key, value in flatdict.items():
      for pattern, rule in self.rules:
        if match := pattern.match(key):
          renamed.append(rule(opts, key, value, *match.groups()))
          break
      else:
        unmatched.append(key)
    if unmatched:
      raise ValueError(
        f"Unmapped tensor keys exist: {', '.join(sorted(unmatched)[:10])} "
        f"({len(unmatched)} in all): add a rule for them with CheckpointTranslator.add"
      )
    return {name: value for name, value in renamed if name is not None}


t5_importer = CheckpointTranslator()


def _name(inner: str, slot: str) -> str:
  """Returns T5X's name of a parameter or, if `slot` is not empty, of a part of its Adafactor state."""
  return f"state/param_states/{inner}/{_SLOTS[slot]}" if slot else f"target/{inner}"


def _side(encdec: str) -> str:
  return "decoder" if encdec == "transformer" else encdec


def _layer(encdec: str, blocknum: str) -> str:
  return f"{_side(encdec)}/layers_{int(blocknum)}"


@t5_importer.add(r"global_step")
def global_step(opts: Any, key: str, val: Any) -> tuple[str, Any]:
  """Renames the number of steps, which is read immediately."""
  return "state/step", val.astype(np.int32).get() if isinstance(val, LazyArray) else val


@t5_importer.add(r"shared/embedding(\w*)")
def shared_embeddings(opts: Any, key: str, val: Any, slot: str) -> tuple[str, Any]:
  """Renames the embedding table that the encoder and the decoder share."""
  return _name("token_embedder/embedding", slot), val


@t5_importer.add(_SIDES + r"/embedding(\w*)")
def separate_embeddings(opts: Any, key: str, val: Any, encdec: str, slot: str) -> tuple[str, Any]:
  """Renames an embedding table that only the encoder or only the decoder uses."""
  return _name(f"{_side(encdec)}/token_embedder/embedding", slot), val


@t5_importer.add(_LAYERS + r"/layer_000/SelfAttention/relative_attention_bias(\w*)")
def rel_embeddings(
  opts: Any, key: str, val: Any, encdec: str, blocknum: str, slot: str
) -> tuple[str, Any]:
  """Renames a layer's relative bias; `read_arrays` finds out whether the layers share it."""
  return _name(f"{_layer(encdec, blocknum)}/relpos_bias/rel_embedding", slot), val


@t5_importer.add(_LAYERS + r"/layer_\d+/(SelfAttention|EncDecAttention)/(q|k|v|o)(\w*)")
def attention_layers(
  opts: Any, key: str, val: Any, encdec: str, blocknum: str, attntype: str, qkvo: str, slot: str
) -> tuple[str, Any]:
  """Renames a matrix of an attention block."""
  names = {"SelfAttention": "self_attention", "EncDecAttention": "encoder_decoder_attention"}
  block = "attention" if encdec == "encoder" else names[attntype]
  matrix = parameter_trees.ATTENTION_MATRICES[qkvo]
  return _name(f"{_layer(encdec, blocknum)}/{block}/{matrix}/kernel", slot), val


@t5_importer.add(_LAYERS + r"/layer_\d+/DenseReluDense/(wi|wo)(?:_(\d+))?/kernel(\w*)")
def mlpblock(
  opts: Any, key: str, val: Any, encdec: str, blocknum: str, io_name: str, io_num: Any, slot: str
) -> tuple[str, Any]:
  """Renames a matrix of a feed-forward block."""
  matrix = io_name if io_num is None else f"{io_name}_{io_num}"
  return _name(f"{_layer(encdec, blocknum)}/mlp/{matrix}/kernel", slot), val


@t5_importer.add(_LAYERS + r"/layer_(\d+)/(?:layer|rms)_norm/scale(\w*)")
def layernorms(
  opts: Any, key: str, val: Any, encdec: str, blocknum: str, lyrnum: str, slot: str
) -> tuple[str, Any]:
  """Renames the layer norm before a block."""
  return _name(f"{_layer(encdec, blocknum)}/{_NORMS[encdec][int(lyrnum)]}/scale", slot), val


@t5_importer.add(_SIDES + r"/(?:final_layer|rms)_norm/scale(\w*)")
def final_layernorms(opts: Any, key: str, val: Any, encdec: str, slot: str) -> tuple[str, Any]:
  """Renames the layer norm after the last layer."""
  return _name(f"{_side(encdec)}/{_side(encdec)}_norm/scale", slot), val


@t5_importer.add(r"(?:decoder|transformer)/logits/kernel(\w*)")
def final_logits(opts: Any, key: str, val: Any, slot: str) -> tuple[str, Any]:
  """Renames the output layer."""
  return _name("decoder/logits_dense/kernel", slot), val


def load_tf_ckpt(path: epath.PathLike) -> dict[str, LazyArray]:
  """Returns {TensorFlow's name: lazy array} of a checkpoint, except for variables of strings.

  Args:
    path: a prefix, or a folder, whose latest checkpoint is then read.

  Raises:
    ValueError: there is no TensorFlow checkpoint, or it is damaged.
  """
  from rosetta_t5.data.tensorflow_import import tf

  prefix = _find_prefix(tf, path)
  lock = threading.Lock()  # A reader must not be used by several threads at once.

  def call(function: Callable[[str], Any], argument: str) -> Any:
    try:
      with lock:
        return function(argument)
    except (tf.errors.OpError, IndexError, RuntimeError) as error:
      raise ValueError(f"{prefix} is damaged: {error}") from error

  reader = call(tf.train.load_checkpoint, prefix)
  shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
  return {
    name: LazyThreadPoolArray(
      shapes[name], dtypes[name].as_numpy_dtype, functools.partial(call, reader.get_tensor, name)
    )
    for name in sorted(shapes)
    if dtypes[name] != tf.string
  }


def _find_prefix(tf: Any, path: epath.PathLike) -> str:
  """Returns the prefix of the checkpoint at `path`, which is a prefix or a folder."""
  folder = epath.Path(path)
  if epath.Path(f"{folder}.index").exists():
    return os.fspath(folder)
  # The file `checkpoint` is missing in a folder that was copied in part, and wrong in one that was moved.
  if latest := tf.train.latest_checkpoint(os.fspath(folder)):
    return str(latest)
  found = {int(file.stem.rpartition("-")[2]): file for file in folder.glob("*.ckpt-*.index")}
  if not found:
    raise ValueError(
      f"{path} is not a TensorFlow checkpoint: there is no file PREFIX.index such as "
      "model.ckpt-1000000.index"
    )
  return os.fspath(found[max(found)]).removesuffix(".index")


def read_arrays(
  path: epath.PathLike, translator: CheckpointTranslator | None = None
) -> dict[str, Any]:
  """Returns {T5X's name: array} of the Mesh TensorFlow checkpoint at `path`.

  Args:
    path: a prefix, or a folder, whose latest checkpoint is then read.
    translator: the rules; None for those of T5 1.0 and 1.1.
  """
  translated = (translator or t5_importer).apply(load_tf_ckpt(path))
  arrays = parameter_trees.rename_shared_biases(translated)
  return arrays | _unused_slots(arrays)


def _unused_slots(arrays: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the zeros [1] that T5X's Adafactor stores for the slots that a parameter does not use."""
  unused = []
  for parameter in (name for name in arrays if name.startswith("target/")):
    slots = parameter.replace("target/", "state/param_states/", 1)
    unused.append(f"{slots}/m")
    if f"{slots}/v" in arrays:
      unused += [f"{slots}/v_row", f"{slots}/v_col"]
    elif f"{slots}/v_row" in arrays:
      unused.append(f"{slots}/v")
  return {name: np.zeros((1,), np.float32) for name in unused}
