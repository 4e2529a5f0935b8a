"""What a checkpoint's weights do not tell of its model, from the config that lies beside it."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.formats.hugging_face import gpt_reader, t5_reader
from rosetta_t5.checkpoints.formats.hugging_face.gpt_names import POSITIONS
from rosetta_t5.conversion import numpy_t5
from rosetta_t5.networks.decoder_config import TransformerConfig

_ACTIVATIONS = re.compile(r"T5Config\.mlp_activations\s*=\s*(\(.*?\)|\[.*?\])", re.DOTALL)
_FIELD = re.compile(r"^(?:[\w.]+\.)?TransformerConfig\.(\w+)\s*=\s*\\?\s*(.+)$", re.MULTILINE)
# A vocabulary whose ids are one higher than those of the tokenizer's files.
_SHIFTED = "gpt2_vocabulary()"


@dataclasses.dataclass(frozen=True)
class ModelFacts:
  """What is to be known of a model besides its weights.

  Attributes:
    activations: T5Config.mlp_activations; a decoder's are in `gpt`.
    gpt: the network's config, if it is GPT's; None for other models, or if no config was found.
    ids_are_shifted: whether ids are one higher than the tokenizer's, whose 0 is no padding.
    base: Hugging Face's config.json, if that is what the model came with.
  """

  activations: tuple[str, ...]
  gpt: TransformerConfig | None = None
  ids_are_shifted: bool = False
  base: Mapping[str, Any] | None = None


def is_gpt(names: Iterable[str]) -> bool:
  """Returns whether parameters are a decoder's with learned positions."""
  return POSITIONS in names


def read_facts(
  path: str | os.PathLike[str],
  arrays: Mapping[str, StoredArray],
  activations: tuple[str, ...] | None = None,
  config: str | os.PathLike[str] | None = None,
) -> ModelFacts:
  """Returns what is told of a checkpoint's model.

  Args:
    path: the checkpoint; the config is a Hugging Face folder's config.json, or a run's config.gin in
      the folder above.
    arrays: the checkpoint's.
    activations: T5Config.mlp_activations, if they are given.
    config: another config.json or config.gin.

  Raises:
    ValueError: `config` is not there, or tells nothing of such a model.
  """
  folder = epath.Path(path)
  is_theirs = t5_reader.is_hugging_face(folder)
  beside = folder / t5_reader.CONFIG if is_theirs else folder.parent / "config.gin"
  file = beside if config is None else epath.Path(config)
  if not file.exists():
    if config is not None:
      raise ValueError(f"--config {file}: there is no such file")
    return ModelFacts(activations or numpy_t5.default_activations(arrays))
  if is_gpt(arrays):
    return _gpt_facts(file)
  if file.suffix == ".json":
    base = t5_reader.read_config(file.parent)
    return ModelFacts(activations or t5_reader.activations(base), base=base)
  match = _ACTIVATIONS.search(file.read_text())
  found = tuple(ast.literal_eval(match[1])) if match else numpy_t5.default_activations(arrays)
  return ModelFacts(activations or found)


def _gpt_facts(file: epath.Path) -> ModelFacts:
  text = file.read_text()
  if file.suffix == ".json":
    base = gpt_reader.read_config(file)
    network = TransformerConfig(**gpt_reader.network_values(base))
    return ModelFacts((), network, not base.get(gpt_reader.KEEPS_IDS), base)
  values = _literals(text)
  if "num_heads" not in values:
    raise ValueError(
      f"{file} binds no TransformerConfig.num_heads: give --config the config.gin of the run that "
      "trained this model, or the config.json it came with"
    )
  fields = {field.name for field in dataclasses.fields(TransformerConfig)}
  network = TransformerConfig(**{name: x for name, x in values.items() if name in fields})
  return ModelFacts((), network, network.padding_never_follows or _SHIFTED in text)


def _literals(text: str) -> dict[str, Any]:
  """Returns the values that a config.gin gives TransformerConfig, macros and references left out."""
  values = {}
  for name, value in _FIELD.findall(text):
    try:
      values[name] = ast.literal_eval(value)
    except (ValueError, SyntaxError):
      continue
  return values
