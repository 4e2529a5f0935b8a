"""Verifies that a conversion kept the model.

Transformers is the only independent check: a mistake that reading and writing have in common shows in
nothing else. Without it, this project's network computes the logits of both checkpoints; if the model is
too large for that, its arrays are compared one by one.
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from etils import epath

from rosetta_t5.adapters import Adapter
from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.arrays.parameter_trees import to_plain_tree
from rosetta_t5.checkpoints.arrays.state_dicts import unflatten_state_dict
from rosetta_t5.checkpoints.checkpoint_folders import read_arrays
from rosetta_t5.checkpoints.formats.hugging_face import folder as hugging_face_folder
from rosetta_t5.checkpoints.formats.hugging_face.name_tables import Arrays, start_token
from rosetta_t5.conversion.model_settings import ModelSettings, read_model_settings
from rosetta_t5.files import read_json_object
from rosetta_t5.networks.transformer import DecoderWrapper, Transformer

TOLERANCE = 1e-4
# Two implementations may differ by this multiple of the rounding errors of one of them.
_ROUNDING_FACTOR = 10.0
# A model is computed if its parameters, in float32, take at most this share of the free memory.
_MEMORY_SHARE = 0.3
_INPUTS, _TARGETS = 60, 30  # tokens
# The encoder's inputs [1, S], and the decoder's inputs [1, T].
Tokens = tuple[np.ndarray, np.ndarray]


class ConversionError(RuntimeError):
  """The model that was written is not the model that was read."""


def verify(
  source: Arrays, path: epath.PathLike, folder: epath.PathLike, settings: ModelSettings
) -> str:
  """Checks that the model in a folder is the source's, and returns a sentence about the check.

  Args:
    source: the arrays that were converted.
    path: the checkpoint that they are from.
    folder: what was written, of any layout.
    settings: those of the source's model.

  Raises:
    ConversionError: the logits or parameters differ.
  """
  written = read_arrays(folder)
  to_transformers = hugging_face_folder.is_hugging_face(folder)
  theirs = next(filter(hugging_face_folder.is_hugging_face, (folder, path)), None)
  has_transformers = all(map(importlib.util.find_spec, ("torch", "transformers")))
  size = 4 * sum(array.size for name, array in written.items() if name.startswith("target/"))
  fits = size <= _MEMORY_SHARE * psutil.virtual_memory().available
  is_computed = fits and settings.network is not None and (to_transformers or has_transformers)
  if not to_transformers or not is_computed:
    count = compare_arrays(source, written, rtol=1e-6 if to_transformers else 0.0)
  if theirs is None or not is_computed:
    reason = "" if fits else ", because the model is too large for this machine's memory"
    return (
      f"{count} arrays were read again, one by one, and are equal. Logits were not compared{reason}: the "
      "settings of the network, and a mistake that reading and writing have in common, cannot be seen"
    )
  tokens = _make_tokens(settings)
  ours = network_outputs(source if to_transformers else written, settings, tokens)
  if has_transformers:
    by = f"Transformers {importlib.metadata.version('transformers')}"
    compute = functools.partial(_transformers_outputs, theirs, settings, tokens)
  else:
    by = "this project's network, because Transformers and PyTorch are not installed"
    again = read_model_settings(folder, written)
    compute = functools.partial(network_outputs, written, again, tokens)
  return f"logits of {ours.shape[1]} tokens, by {by}: {_compare_logits(ours, compute)}"


# A model's arrays, and the adapter whose parameters are among them.
Adapted = tuple[Arrays, Adapter | None]


def compare_networks(before: Adapted, after: Adapted, settings: ModelSettings) -> str:
  """Checks that a model computes the same logits with an adapter in another form, such as merged.

  Args:
    before: the model with the adapter.
    after: the model in which it was merged, or written and read again.
    settings: those of the model.

  Returns:
    The largest difference, or why it was not computed, as text.

  Raises:
    ConversionError: the logits differ.
  """
  size = 4 * sum(array.size for array in before[0].values())
  if settings.network is None or size > _MEMORY_SHARE * psutil.virtual_memory().available:
    return "not compared, because the network's settings or enough memory are missing"
  tokens = _make_tokens(settings)
  arrays, adapter = before
  compute = functools.partial(network_outputs, arrays, settings, tokens, adapter)
  return _compare_logits(network_outputs(after[0], settings, tokens, after[1]), compute)


def _compare_logits(ours: np.ndarray, compute: Callable[..., np.ndarray]) -> str:
  """Returns as text the largest difference from the logits that `compute` returns.

  Args:
    ours: the logits that are checked.
    compute: returns those that are expected, of parameters that are changed at random by `change`.
  """
  others = compute()
  difference = _largest_difference(ours, others)
  limit = TOLERANCE * max(1.0, float(np.max(np.abs(ours))) / 10)
  shown = f"largest difference {difference:.1e}"
  if difference > limit:
    # Sharp attention amplifies the rounding errors of float32, in every implementation.
    rounding = _largest_difference(others, compute(change=2.0**-24))
    shown += f" ({rounding:.1e} if the parameters are rounded differently)"
    limit = max(limit, _ROUNDING_FACTOR * rounding)
  if not difference <= limit:
    raise ConversionError(
      f"the logits of the source and of what was written differ by too much: {shown}, at most {limit:.0e} "
      "is allowed, so nothing was kept"
    )
  return shown


def _largest_difference(expected: np.ndarray, actual: np.ndarray) -> float:
  # GPT's start token may have become the last one of the second vocabulary.
  return float(np.max(np.abs(expected - actual[..., : expected.shape[-1]])))


def network_outputs(
  arrays: Arrays,
  settings: ModelSettings,
  tokens: Tokens,
  adapter: Adapter | None = None,
  change: float = 0.0,
) -> np.ndarray:
  """Returns the logits [1, T, V] of a model, or the outputs [1, S, D] of an encoder without a decoder.

  Args:
    arrays: the model's arrays.
    settings: those of the model.
    tokens: ids by this project's vocabulary, without padding except as the start of the decoder.
    adapter: the adapter whose parameters are among the arrays; None without one.
    change: how much every parameter is changed at random, relative to its value.
  """
  plain, random = to_plain_tree(arrays), np.random.default_rng(0)

  def read(array: StoredArray) -> jax.Array:
    value = np.asarray(array.get(), np.float32)
    noise = random.standard_normal(value.shape, np.float32) if change else 0.0
    return jnp.asarray(value * (1 + change * noise), jnp.float32)

  changes: dict[str, Any] = {"dtype": jnp.float32, "attention_kernel": "xla"}
  if settings.is_decoder:
    changes["padding_never_follows"] = False  # Transformers computes a logit for each token.
  config: Any = dataclasses.replace(settings.network, **changes)
  module: Any = DecoderWrapper(config) if settings.is_decoder else Transformer(config)
  module = module if adapter is None else adapter.adapt(module)
  values = {name: read(array) for name, array in plain.items()}
  params = unflatten_state_dict(values)["target"]
  inputs, targets = (jnp.asarray(ids, jnp.int32) for ids in tokens)
  call, options = [inputs, targets, jnp.ones_like(targets)], {"enable_dropout": False}
  if settings.is_decoder:
    call = call[1:]
  elif "decoder" not in params:
    call, options["method"] = [inputs], module.encode
  with jax.default_matmul_precision("highest"):
    apply = jax.jit(functools.partial(module.apply, **options))
    outputs = np.array(apply({"params": params}, *call))
  if settings.ids_are_shifted and (start := settings.network.decoder_start_token_id):
    outputs[..., 0] = outputs[..., start]  # Nothing reads row 0, which training may leave behind.
  return outputs[..., : outputs.shape[-1] - settings.network.unused_rows]


def _transformers_outputs(
  folder: epath.PathLike, settings: ModelSettings, tokens: Tokens, change: float = 0.0
) -> np.ndarray:
  """Returns what `network_outputs` returns, computed by Transformers and PyTorch on the CPU.

  Args:
    folder: a Hugging Face folder.
    settings: those of the model.
    tokens: as in `network_outputs`.
    change: as in `network_outputs`.
  """
  import torch
  import transformers

  config = hugging_face_folder.read_config(epath.Path(folder) / hugging_face_folder.CONFIG)
  name = hugging_face_folder.architecture(config["model_type"], settings.network)
  stored = read_json_object(epath.Path(folder) / hugging_face_folder.CONFIG)
  if "text_config" in stored:  # The class of the text part alone does not read its weights there.
    name = stored["architectures"][0]
  model = getattr(transformers, name).from_pretrained(os.fspath(folder), dtype=torch.float32).eval()
  inputs_1S, targets_1T = tokens
  start = start_token(config) if settings.is_decoder else settings.network.decoder_start_token_id
  targets_1T = np.where(targets_1T == 0, start, targets_1T - settings.ids_are_shifted)
  inputs, targets = torch.tensor(inputs_1S), torch.tensor(targets_1T)
  with torch.no_grad():
    random = torch.Generator().manual_seed(0)
    for parameter in model.parameters() if change else ():
      parameter.mul_(1 + change * torch.randn(parameter.shape, generator=random))
    if settings.is_decoder:
      outputs = model(input_ids=targets).logits
    elif settings.network.num_decoder_layers:
      outputs = model(input_ids=inputs, decoder_input_ids=targets).logits
    else:
      outputs = model(input_ids=inputs).last_hidden_state
  outputs_1TV: np.ndarray = outputs.numpy()
  if settings.ids_are_shifted:
    return np.concatenate([outputs_1TV[..., start : start + 1], outputs_1TV], -1)
  return outputs_1TV


def compare_arrays(before: Arrays, after: Arrays, rtol: float = 0.0) -> int:
  """Checks that two checkpoints have equal parameters; either may stack its layers.

  Args:
    before: the arrays of one checkpoint.
    after: those of the other one.
    rtol: the largest relative difference; a matrix may have been scaled twice.

  Returns:
    The number of arrays.

  Raises:
    ConversionError: names or values differ.
  """
  ours, theirs = to_plain_tree(before), to_plain_tree(after)
  wrong = sorted(ours.keys() ^ theirs.keys()) or [
    name for name, array in ours.items() if not _are_close(array, theirs[name], rtol)
  ]
  if wrong:
    raise ConversionError(
      f"{len(wrong)} parameters differ between the source and what was written, {wrong[0]} first: "
      "nothing was kept"
    )
  return len(ours)


def _are_close(a: StoredArray, b: StoredArray, rtol: float) -> bool:
  if a.shape != b.shape:
    return False
  rtol = max(rtol, 2.0**-8) if rtol and a.dtype.itemsize == 2 else rtol
  return all(
    np.allclose(a.read(part).astype(np.float64), b.read(part).astype(np.float64), rtol, 0.0)
    for part in a.parts()
  )


def _make_tokens(settings: ModelSettings) -> Tokens:
  """Returns random tokens, of which the targets begin with 0, the start of the decoder."""
  random, size = np.random.default_rng(0), settings.network.vocab_size
  size -= settings.network.unused_rows
  # Small vocabularies, as in tests, have few ids that are not special.
  inputs, targets = (random.integers(min(3, size - 1), size, (1, n)) for n in (_INPUTS, _TARGETS))
  if settings.is_decoder:
    # Local attention needs more than its window.
    targets = np.concatenate([targets, inputs], -1)[:, : settings.network.max_length]
  targets[0, 0] = 0
  return inputs, targets
