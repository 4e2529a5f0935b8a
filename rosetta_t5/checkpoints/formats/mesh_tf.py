"""Reads Mesh TensorFlow's T5 checkpoints under T5X's names (T5X's `checkpoint_importer`)."""

import functools
import os
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from etils import epath

from rosetta_t5.checkpoints.arrays import parameter_trees
from rosetta_t5.checkpoints.arrays.lazy_arrays import LazyArray

Rule = Callable[..., tuple[str | None, Any]]

# Suffixes of the variables that hold Adafactor's state.
_SLOTS = {"_slot_vc": "v_col", "_slot_vr": "v_row", "_slot_v": "v"}
# `transformer` is the name of a decoder without an encoder.
_NORMS = {
  **parameter_trees.NORMS,
  "transformer": ("pre_self_attention_layer_norm", "pre_mlp_layer_norm"),
}
_ATTENTIONS = {"SelfAttention": "self_attention", "EncDecAttention": "encoder_decoder_attention"}
_SIDE = "(?P<side>encoder|decoder|transformer)"
_LAYER = _SIDE + r"/block_(?P<layer>\d+)/layer_"
# {pattern of TensorFlow's name: T5X's name of the parameter}
_PARAMETERS = {
  r"shared/embedding": "token_embedder/embedding",
  # Only the encoder or only the decoder uses such a table.
  _SIDE + r"/embedding": "{side}/token_embedder/embedding",
  # `read_arrays` finds out whether the layers share it.
  _LAYER + r"000/SelfAttention/relative_attention_bias": "{layer}/relpos_bias/rel_embedding",
  _LAYER + r"\d+/(?P<block>\w+Attention)/(?P<matrix>[qkvo])": "{layer}/{block}/{matrix}/kernel",
  _LAYER + r"\d+/DenseReluDense/(?P<mlp>w[io](?:_\d+)?)/kernel": "{layer}/mlp/{mlp}/kernel",
  _LAYER + r"(?P<norm>\d+)/(?:layer|rms)_norm/scale": "{layer}/{norm}/scale",
  _SIDE + r"/(?:final_layer|rms)_norm/scale": "{side}/{side}_norm/scale",
  r"(?:decoder|transformer)/logits/kernel": "decoder/logits_dense/kernel",
}


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


@t5_importer.add(r"global_step")
def global_step(opts: Any, key: str, val: Any) -> tuple[str, Any]:
  """Renames the number of steps, which is read immediately."""
  return "state/step", val.astype(np.int32).get() if isinstance(val, LazyArray) else val


def _rename(
  pattern: re.Pattern[str], template: str, opts: Any, key: str, val: Any, *groups: str
) -> tuple[str, Any]:
  """Renames a parameter or, if its name ends with the suffix of a slot, a part of its Adafactor state."""
  match: Any = pattern.match(key)
  names = match.groupdict()
  their_side, slot = names.get("side"), names["slot"]
  names["side"] = side = "decoder" if their_side == "transformer" else their_side
  if "layer" in names:
    names["layer"] = f"{side}/layers_{int(names['layer'])}"
  if "norm" in names:
    names["norm"] = _NORMS[their_side][int(names["norm"])]
  if "matrix" in names:
    names["block"] = "attention" if side == "encoder" else _ATTENTIONS[names["block"]]
    names["matrix"] = parameter_trees.ATTENTION_MATRICES[names["matrix"]]
  name = template.format(**names)
  return f"state/param_states/{name}/{_SLOTS[slot]}" if slot else f"target/{name}", val


for _name, _template in _PARAMETERS.items():
  _pattern = re.compile(f"{_name}(?P<slot>{'|'.join(_SLOTS)})?$")
  t5_importer.rules.append((_pattern, functools.partial(_rename, _pattern, _template)))


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
    name: LazyArray(
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
    raise ValueError(f"{path} is not a TensorFlow checkpoint: there is no file PREFIX.index")
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
