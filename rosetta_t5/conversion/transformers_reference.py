"""Computes logits with Transformers and PyTorch on the CPU, if both are installed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
from typing import Any

import numpy as np
from etils import epath

from rosetta_t5.checkpoints.formats.hugging_face import folder as folder_format
from rosetta_t5.checkpoints.formats.hugging_face import gpt
from rosetta_t5.conversion.model_facts import ModelFacts

# A model is computed if its parameters, in float32, take at most this share of the free memory.
_MEMORY_SHARE = 0.3


def fits(params: int) -> bool:
  """Returns whether a model with this many parameters can be computed in the free memory."""
  free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  with contextlib.suppress(OSError, StopIteration), open("/proc/meminfo") as file:
    line = next(line for line in file if line.startswith("MemAvailable"))
    free = int(line.split()[1]) * 1024
  return params * 4 <= _MEMORY_SHARE * free


def why_not(params: int) -> str:
  """Returns why Transformers cannot compute a model with this many parameters; "" if it can."""
  if not all(map(importlib.util.find_spec, ("torch", "transformers"))):
    return "Transformers and PyTorch are not installed"
  return "" if fits(params) else "the model is too large for this machine's memory"


def version() -> str:
  """Returns the version of Transformers."""
  return importlib.metadata.version("transformers")


def outputs(
  folder: str | os.PathLike[str],
  tokens: tuple[np.ndarray, np.ndarray],
  facts: ModelFacts,
  dtype: Any,
) -> np.ndarray:
  """Returns the logits [1, T, V] of a model by our token ids, or the outputs [1, S, D] of an encoder.

  Args:
    folder: a Hugging Face folder.
    tokens: our ids for the encoder [1, S] and for the decoder [1, T].
    facts: what the weights do not show, such as whether our ids are Transformers' plus 1.
    dtype: the dtype to compute in, float32 or float64.
  """
  import torch
  import transformers

  config = json.loads((epath.Path(folder) / folder_format.CONFIG).read_text())
  is_float64 = np.dtype(dtype) == np.float64
  model_class = getattr(transformers, folder_format.architecture(config, facts.network))
  precision = torch.float64 if is_float64 else torch.float32
  model = model_class.from_pretrained(os.fspath(folder), dtype=precision).eval()
  inputs_1S, targets_1T = tokens
  start = gpt.start_token(config)
  if facts.ids_are_shifted:
    targets_1T = np.where(targets_1T == 0, start, targets_1T - 1)
  elif not facts.is_gpt:
    targets_1T = np.where(targets_1T == 0, facts.network.decoder_start_token_id, targets_1T)
  inputs, targets = torch.tensor(inputs_1S), torch.tensor(targets_1T)
  with torch.no_grad(), _compute_in_float64() if is_float64 else contextlib.nullcontext():
    if facts.is_gpt:
      outputs = model(input_ids=targets).logits
    elif facts.network.num_decoder_layers:
      outputs = model(input_ids=inputs, decoder_input_ids=targets).logits
    else:
      outputs = model(input_ids=inputs).last_hidden_state
  outputs_1TV: np.ndarray = outputs.numpy()
  if facts.ids_are_shifted:
    return np.concatenate([outputs_1TV[..., start : start + 1], outputs_1TV], -1)
  return outputs_1TV


def _compute_in_float64() -> Any:
  """Returns a context that also computes norms and softmaxes in float64; models request float32 there."""
  import torch
  from torch.overrides import TorchFunctionMode

  def widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value

  class Float64Mode(TorchFunctionMode):
    def __torch_function__(
      self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
      function = torch.Tensor.double if func is torch.Tensor.float else func
      keywords = {name: widen(value) for name, value in (kwargs or {}).items()}
      return function(*map(widen, args), **keywords)

  return Float64Mode()
