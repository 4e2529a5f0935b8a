"""What Transformers on PyTorch's CPU computes of a folder, where both are installed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from typing import Any

import numpy as np
from etils import epath

from rosetta_t5.checkpoints.formats.hugging_face import gpt_reader, t5_reader
from rosetta_t5.conversion.model_facts import ModelFacts

# Beyond this PyTorch would need more memory for parameters than a conversion should.
_TORCH_BYTES = 4_000_000_000


def can_run_transformers(params: int, dtype: Any) -> bool:
  """Returns whether Transformers and PyTorch are installed, and so many parameters are not too many."""
  if params * np.dtype(dtype).itemsize > _TORCH_BYTES:
    return False
  return all(map(importlib.util.find_spec, ("torch", "transformers")))


def transformers_outputs(
  folder: str | os.PathLike[str],
  tokens: tuple[np.ndarray, np.ndarray],
  facts: ModelFacts,
  dtype: Any,
) -> np.ndarray:
  """Returns what Transformers and PyTorch make of a folder, in the order of our ids.

  Args:
    folder: of Hugging Face's layout.
    tokens: our ids, of the encoder [1, S] and of the decoder [1, T].
    facts: of the folder.
    dtype: to compute in, float32 or float64.
  """
  import torch
  import transformers

  is_exact = np.dtype(dtype) == np.float64
  config = json.loads((epath.Path(folder) / t5_reader.CONFIG).read_text())
  cls = getattr(transformers, config["architectures"][0])
  precision = torch.float64 if is_exact else torch.float32
  model = cls.from_pretrained(os.fspath(folder), dtype=precision).eval()
  inputs_1S, targets_1T = tokens
  start = 0
  if facts.ids_are_shifted:
    start = gpt_reader.start_token(config)
    targets_1T = np.where(targets_1T == 0, start, targets_1T - 1)
  inputs, targets = torch.tensor(inputs_1S), torch.tensor(targets_1T)
  with torch.no_grad(), _everything_in_float64() if is_exact else contextlib.nullcontext():
    if facts.gpt is not None:
      logits_1TV = model(input_ids=targets).logits.numpy()
      first_1T1 = logits_1TV[..., start : start + 1]
      return np.concatenate([first_1T1, logits_1TV], -1) if facts.ids_are_shifted else logits_1TV
    if not config["is_encoder_decoder"]:
      encoded: np.ndarray = model(input_ids=inputs).last_hidden_state.numpy()
      return encoded
    logits: np.ndarray = model(input_ids=inputs, decoder_input_ids=targets).logits.numpy()
    return logits


def _everything_in_float64() -> Any:
  """Returns a context in which what models compute in float32 whatever they are, norms and softmax, is not."""
  import torch
  from torch.overrides import TorchFunctionMode

  def wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value

  class InFloat64(TorchFunctionMode):
    def __torch_function__(
      self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
      function = torch.Tensor.double if func is torch.Tensor.float else func
      named = {name: wider(value) for name, value in (kwargs or {}).items()}
      return function(*map(wider, args), **named)

  return InFloat64()
