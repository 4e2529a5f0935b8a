"""Mesh TensorFlow's T5 checkpoints under T5X's names (T5X's `checkpoint_importer`)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from rosetta_t5.checkpoints.arrays.lazy_arrays import LazyArray
from rosetta_t5.checkpoints.arrays.state_dicts import flatten_state_dict, unflatten_state_dict
from rosetta_t5.checkpoints.fit import CheckpointMismatchError, compare, mismatch_error
from rosetta_t5.checkpoints.formats import tensor_bundle

Rule = Callable[..., tuple[str | None, Any]]

_SLOTS = {"_slot_vc": "v_col", "_slot_vr": "v_row", "_slot_v": "v"}
_MATRICES = {"q": "query", "k": "key", "v": "value", "o": "out"}
_NORMS = {
  "encoder": ("pre_attention_layer_norm", "pre_mlp_layer_norm"),
  "decoder": (
    "pre_self_attention_layer_norm",
    "pre_cross_attention_layer_norm",
    "pre_mlp_layer_norm",
  ),
  "transformer": ("pre_self_attention_layer_norm", "pre_mlp_layer_norm"),
}
_SIDES = "(encoder|decoder|transformer)"


class CheckpointTranslator:
  """Rules that rename the entries of a flat dict; each entry needs one (T5X's class).

  Attributes:
    rules: (compiled pattern, function) pairs, in order.
  """

  def __init__(self) -> None:
    """Builds a translator without rules."""
    self.rules: list[tuple[re.Pattern[str], Rule]] = []

  def add(self, pattern: str) -> Callable[[Rule], Rule]:
    """Returns a decorator that adds `fn(opts, key, value, *groups) -> (new key or None, value)`.

    Args:
      pattern: of whole keys; its groups are handed to the function.
    """

    def register(fn: Rule) -> Rule:
      self.rules.append((re.compile(pattern + "$"), fn))
      return fn

    return register

  def apply(self, flatdict: Mapping[str, Any], **opts: Any) -> dict[str, Any]:
    """Returns `flatdict` under the new names; an entry renamed to None is left out.

    Args:
      flatdict: values by name.
      **opts: handed to the rules as a dict.

    Raises:
      ValueError: no rule matches some names.
    """
    renamed: dict[str, Any] = {}
    strangers = []
    for key, value in flatdict.items():
      found = next(((rule, m) for p, rule in self.rules if (m := p.match(key))), None)
      if found is None:
        strangers.append(key)
        continue
      rule, match = found
      new_key, new_value = rule(opts, key, value, *match.groups())
      if new_key is not None:
        renamed[new_key] = new_value
    if strangers:
      raise ValueError(
        f"Unmapped tensor keys exist: {', '.join(sorted(strangers)[:10])} ({len(strangers)} in all): "
        "add a rule for them with CheckpointTranslator.add"
      )
    return renamed


t5_importer = CheckpointTranslator()


def _name(inner: str, slot: str | None) -> str:
  """Returns the name of a parameter, or of the part of Adafactor's state that `slot` says."""
  return f"state/param_states/{inner}/{_SLOTS[slot]}" if slot else f"target/{inner}"


def _side(encdec: str) -> str:
  return "decoder" if encdec == "transformer" else encdec


@t5_importer.add(r"global_step")
def global_step(opts: Any, key: str, val: Any) -> tuple[str, Any]:
  """Names the number of steps; it is read at once."""
  del opts, key
  return "state/step", val.astype(np.int32).get() if isinstance(val, LazyArray) else val


@t5_importer.add(r"shared/embedding(\w*)")
def shared_embeddings(opts: Any, key: str, val: Any, slot: str) -> tuple[str, Any]:
  """Names the embedding table that encoder and decoder share."""
  del opts, key
  return _name("token_embedder/embedding", slot), val


@t5_importer.add(_SIDES + r"/embedding(\w*)")
def separate_embeddings(opts: Any, key: str, val: Any, encdec: str, slot: str) -> tuple[str, Any]:
  """Names the embedding table of one side."""
  del opts, key
  return _name(f"{_side(encdec)}/token_embedder/embedding", slot), val


@t5_importer.add(_SIDES + r"/block_(\d+)/layer_000/SelfAttention/relative_attention_bias(\w*)")
def rel_embeddings(
  opts: Any, key: str, val: Any, encdec: str, blocknum: str, slot: str
) -> tuple[str, Any]:
  """Names a relative bias after its layer; `restore_from_t5_checkpoint` sees whether it is shared."""
  del opts, key
  return _name(f"{_side(encdec)}/layers_{int(blocknum)}/relpos_bias/rel_embedding", slot), val


@t5_importer.add(_SIDES + r"/block_(\d+)/layer_\d+/(SelfAttention|EncDecAttention)/(q|k|v|o)(\w*)")
def attention_layers(
  opts: Any,
  key: str,
  val: Any,
  encdec: str,
  blocknum: str,
  attntype: str,
  qkvo: str,
  slot: str,
) -> tuple[str, Any]:
  """Names a matrix of an attention block."""
  del opts, key
  names = {"SelfAttention": "self_attention", "EncDecAttention": "encoder_decoder_attention"}
  block = "attention" if encdec == "encoder" else names[attntype]
  layer = f"{_side(encdec)}/layers_{int(blocknum)}"
  return _name(f"{layer}/{block}/{_MATRICES[qkvo]}/kernel", slot), val


@t5_importer.add(_SIDES + r"/block_(\d+)/layer_\d+/DenseReluDense/(wi|wo)(?:_(\d+))?/kernel(\w*)")
def mlpblock(
  opts: Any,
  key: str,
  val: Any,
  encdec: str,
  blocknum: str,
  io_name: str,
  io_num: str | None,
  slot: str,
) -> tuple[str, Any]:
  """Names a matrix of a feed-forward block."""
  del opts, key
  matrix = io_name if io_num is None else f"{io_name}_{io_num}"
  return _name(f"{_side(encdec)}/layers_{int(blocknum)}/mlp/{matrix}/kernel", slot), val


@t5_importer.add(_SIDES + r"/block_(\d+)/layer_(\d+)/(?:layer|rms)_norm/scale(\w*)")
def layernorms(
  opts: Any, key: str, val: Any, encdec: str, blocknum: str, lyrnum: str, slot: str
) -> tuple[str, Any]:
  """Names the norm before a block."""
  del opts, key
  norm = _NORMS[encdec][int(lyrnum)]
  return _name(f"{_side(encdec)}/layers_{int(blocknum)}/{norm}/scale", slot), val


@t5_importer.add(_SIDES + r"/(?:final_layer|rms)_norm/scale(\w*)")
def final_layernorms(opts: Any, key: str, val: Any, encdec: str, slot: str) -> tuple[str, Any]:
  """Names the norm after a stack."""
  del opts, key
  side = _side(encdec)
  return _name(f"{side}/{side}_norm/scale", slot), val


@t5_importer.add(r"(?:decoder|transformer)/logits/kernel(\w*)")
def final_logits(opts: Any, key: str, val: Any, slot: str) -> tuple[str, Any]:
  """Names the output layer."""
  del opts, key
  return _name("decoder/logits_dense/kernel", slot), val


def load_tf_ckpt(path: str | os.PathLike[str]) -> dict[str, LazyArray]:
  """Returns {TensorFlow's name: lazy array} of a checkpoint, its folder or its prefix."""
  return dict(tensor_bundle.read_arrays(path))


def read_arrays(
  path: str | os.PathLike[str], translator: CheckpointTranslator | None = None
) -> dict[str, Any]:
  """Returns {T5X's name: array} of the Mesh TensorFlow checkpoint at `path`.

  Args:
    path: a prefix, or the folder with the file `checkpoint`.
    translator: the rules; None for those of T5 1.0 and 1.1.
  """
  translated = (translator or t5_importer).apply(load_tf_ckpt(path))
  return _with_shared_bias(_with_dummy_slots(translated))


def restore_from_t5_checkpoint(
  state_dict: Mapping[str, Any],
  path: str | os.PathLike[str],
  lazy_parameters: bool = False,
  strict: bool = True,
  translator: CheckpointTranslator | None = None,
) -> dict[str, Any]:
  """Returns a nested state dict with the values of a Mesh TensorFlow checkpoint (T5X's function).

  Args:
    state_dict: the state dict of the model with T5X's Adafactor; its shapes are what counts.
    path: a prefix, or the folder with the file `checkpoint`.
    lazy_parameters: leave values on disk until they are asked for.
    strict: refuse names that `state_dict` has not; else they are left out.
    translator: the rules; None for those of T5 1.0 and 1.1.

  Raises:
    CheckpointMismatchError: names or shapes differ.
  """
  arrays = read_arrays(path, translator)
  expected = {n: x for n, x in flatten_state_dict(state_dict).items() if hasattr(x, "shape")}
  if not strict:
    arrays = {name: array for name, array in arrays.items() if name in expected}
  # As in T5X, a name that only the model has is left to the train state to miss.
  misfits = [misfit for misfit in compare(arrays, expected) if misfit.problem != "missing"]
  if misfits:
    raise mismatch_error(path, misfits)
  if not lazy_parameters:
    arrays = jax.tree.map(lambda x: x.get() if isinstance(x, LazyArray) else x, arrays)
  return unflatten_state_dict(arrays)


def _with_dummy_slots(arrays: dict[str, Any]) -> dict[str, Any]:
  """Adds the single zeros that stand in Adafactor's state for what a parameter does not need."""
  dummies = {}
  for name in arrays:
    if not name.startswith("target/"):
      continue
    slots = name.replace("target/", "state/param_states/", 1)
    unused = ["m"]
    if f"{slots}/v" in arrays:
      unused += ["v_row", "v_col"]
    elif f"{slots}/v_row" in arrays:
      unused += ["v"]
    dummies.update({f"{slots}/{slot}": np.zeros((1,), np.float32) for slot in unused})
  return {**arrays, **dummies}


def _with_shared_bias(arrays: dict[str, Any]) -> dict[str, Any]:
  """Gives biases that only layers 0 have the stack's name: the layers share them."""
  numbers = [int(match[1]) for n in arrays if (match := re.search(r"layers_(\d+)/relpos_bias", n))]
  if max(numbers, default=0) > 0:
    return arrays
  return {name.replace("layers_0/relpos_bias", "relpos_bias"): x for name, x in arrays.items()}


__all__ = [
  "CheckpointMismatchError",
  "CheckpointTranslator",
  "attention_layers",
  "final_layernorms",
  "final_logits",
  "global_step",
  "layernorms",
  "load_tf_ckpt",
  "mlpblock",
  "read_arrays",
  "rel_embeddings",
  "restore_from_t5_checkpoint",
  "separate_embeddings",
  "shared_embeddings",
  "t5_importer",
]
