"""Reads what a folder of sentence-transformers, such as Sentence-T5, computes after its encoder."""

import json
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from rosetta_t5.argument_types import check_one_of
from rosetta_t5.checkpoints.formats.hugging_face.folder import read_weights
from rosetta_t5.files import expect_content, read_json_object

MODULES = "modules.json"
_POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}
_ACTIVATIONS: dict[str, Any] = {"Identity": lambda x: x, "Tanh": np.tanh}


class SentenceModules(NamedTuple):
  """The modules after the encoder.

  Attributes:
    pooling: "mean" or "first", as in `EncoderDecoderModel.embed_batch`.
    max_length: the number of tokens that are read; None for the tokenizer's.
    steps: functions of vectors [N, D] that follow in this order.
  """

  pooling: str
  max_length: int | None
  steps: tuple[Any, ...]


def read_sentence_modules(folder: epath.PathLike) -> SentenceModules | None:
  """Returns the modules that a folder lists in modules.json; None without this file.

  Raises:
    ValueError: the folder has a module or a setting that this project does not have.
  """
  root = epath.Path(folder)
  if not (root / MODULES).exists():
    return None
  settings = root / "sentence_bert_config.json"
  max_length = read_json_object(settings).get("max_seq_length") if settings.exists() else None
  pooling, steps = "mean", []
  with expect_content(root / MODULES, "a list of modules"):
    for module in json.loads((root / MODULES).read_text())[1:]:
      kind, path = module["type"].rpartition(".")[2], root / module["path"]
      check_one_of(f"{root / MODULES}: the module", kind, ("Pooling", "Dense", "Normalize"))
      if kind == "Pooling":
        pooling = _read_pooling(path / "config.json")
      else:
        steps.append(_normalize if kind == "Normalize" else _read_dense(path))
  return SentenceModules(pooling, max_length, tuple(steps))


def _read_pooling(file: epath.Path) -> str:
  switches = read_json_object(file).items()
  mode = " and ".join(k for k, is_on in switches if k.startswith("pooling_mode_") and is_on)
  check_one_of(f"{file}: the mode that is on", mode, _POOLINGS)
  return _POOLINGS[mode]


def _read_dense(folder: epath.Path) -> Any:
  config = read_json_object(folder / "config.json")
  name = str(config.get("activation_function")).rpartition(".")[2]
  check_one_of(f"{folder / 'config.json'}: activation_function", name, _ACTIVATIONS)
  weights = {k: np.asarray(x.get(), np.float32) for k, x in read_weights(folder).items()}
  with expect_content(folder, "linear.weight"):
    kernel, bias = weights["linear.weight"].T, weights.get("linear.bias", np.float32(0))
  return lambda vectors_ND: _ACTIVATIONS[name](vectors_ND @ kernel + bias)


def _normalize(vectors_ND: np.ndarray) -> np.ndarray:
  norms_N1 = np.linalg.norm(vectors_ND, axis=1, keepdims=True)
  return vectors_ND / np.maximum(norms_N1, 1e-12)
