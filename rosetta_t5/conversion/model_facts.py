"""Facts about a checkpoint's model that its weights do not show, read from the config beside it."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import os
import pathlib
import re
import typing
from collections.abc import Mapping
from typing import Any

from etils import epath

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.arrays.tree_layouts import to_plain_tree
from rosetta_t5.checkpoints.formats.hugging_face import (
  folder,
  gpt_names,
  gpt_reader,
  switch_names,
  t5_names,
  t5_reader,
)
from rosetta_t5.checkpoints.formats.hugging_face.config_sizes import check_config
from rosetta_t5.config.checks import declared_types
from rosetta_t5.conversion import numpy_t5
from rosetta_t5.networks.decoder_config import TransformerConfig
from rosetta_t5.networks.expert_settings import ExpertSettings

# A binding in a config.gin. Only a value in brackets may span several lines.
_BINDING = r"^(?:[\w./]+\.)?{configurable}\.(\w+)\s*=\s*\\?\s*(\([^)]*\)|\[[^]]*\]|.+)$"
# The vocabulary whose ids are one higher than those of the tokenizer's files.
_SHIFTED_VOCABULARY = "gpt2_vocabulary()"


_DEFAULT_EXPERTS = ExpertSettings(expert_capacity=switch_names.EXPERT_CAPACITY)


@dataclasses.dataclass(frozen=True)
class ModelFacts:
  """Facts about a model that its weights do not show.

  Attributes:
    activations: T5Config.mlp_activations; a decoder's are in `gpt`.
    gpt: the network's config, if it is a GPT's; None for other models, or if there is no config.
    ids_are_shifted: whether ids are one higher than the tokenizer's, whose id 0 is not padding.
    source_config: the content of the config.json that the model came with; {} if there is none.
    experts: how tokens are routed if layers have experts. Without a config, it is the default of
      Transformers.
  """

  activations: tuple[str, ...]
  gpt: TransformerConfig | None = None
  ids_are_shifted: bool = False
  source_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  experts: ExpertSettings = _DEFAULT_EXPERTS


def read_facts(
  path: str | os.PathLike[str],
  arrays: Mapping[str, StoredArray],
  activations: tuple[str, ...] | None = None,
  config: str | os.PathLike[str] | None = None,
) -> ModelFacts:
  """Returns the facts about a checkpoint's model.

  Args:
    path: the checkpoint. Its config is the folder's config.json or, for a run's checkpoint, the
      config.gin in the folder above.
    activations: T5Config.mlp_activations, if the user sets them.
    config: a config.json or config.gin to read instead.

  Raises:
    ValueError: `config` does not exist, or does not describe such a model.
  """
  checkpoint = epath.Path(path)
  if config is not None:
    file = epath.Path(config)
  elif folder.is_hugging_face(checkpoint):
    file = checkpoint / folder.CONFIG
  else:
    file = checkpoint.parent / "config.gin"
  if not file.exists():
    if config is not None:
      raise ValueError(f"--config {file}: there is no such file")
    return ModelFacts(activations or numpy_t5.default_activations(arrays))
  if gpt_names.POSITIONS in arrays:
    return _read_gpt_facts(file, arrays)
  if file.suffix == ".json":
    contents = folder.read_config(file, t5_names.FAMILIES)
    check_config(file, contents, to_plain_tree(arrays))
    activations = activations or t5_reader.read_activations(contents)
    capacity = contents.get("expert_capacity", switch_names.EXPERT_CAPACITY)
    experts = ExpertSettings(expert_capacity=capacity)
    return ModelFacts(activations, source_config=contents, experts=experts)
  values = _read_literals(_read_text(file), "T5Config")
  found = values.get("mlp_activations")
  fields = {field.name for field in dataclasses.fields(ExpertSettings)}
  experts = ExpertSettings(**{name: x for name, x in values.items() if name in fields})
  activations = activations or tuple(found or numpy_t5.default_activations(arrays))
  return ModelFacts(activations, experts=experts)


def _read_gpt_facts(file: epath.Path, arrays: Mapping[str, StoredArray]) -> ModelFacts:
  if file.suffix == ".json":
    contents = folder.read_config(file, gpt_names.FAMILIES)
    check_config(file, contents, to_plain_tree(arrays))
    network = _make_network(file, gpt_reader.network_values(contents))
    return ModelFacts((), network, not contents.get(gpt_reader.PADDING_IS_TOKEN_0), contents)
  text = _read_text(file)
  values = _read_literals(text, "TransformerConfig")
  if "num_heads" not in values:
    raise ValueError(
      f"{file} does not bind TransformerConfig.num_heads: set --config to the config.gin of the run "
      "that trained this model, or to the config.json that it came with"
    )
  network = _make_network(file, values)
  return ModelFacts((), network, network.padding_never_follows or _SHIFTED_VOCABULARY in text)


def _make_network(file: epath.Path, values: Mapping[str, Any]) -> TransformerConfig:
  """Returns the network with the fields among `values`, which must have the fields' types."""
  types = typing.get_type_hints(TransformerConfig, include_extras=True)
  fields = {name: value for name, value in values.items() if name in types}
  for name, value in fields.items():
    if not declared_types.accepts(value, types[name]):
      raise ValueError(
        f"{file}: {name} must be {declared_types.describe(types[name])}, got {value!r}"
      )
  return TransformerConfig(**fields)


def _read_text(file: epath.Path) -> str:
  if pathlib.Path(file).is_fifo():
    raise ValueError(f"{file} is a pipe, not a file")
  return file.read_bytes().decode("utf-8", errors="replace")


def _read_literals(text: str, configurable: str) -> dict[str, Any]:
  """Returns the literal values that a config.gin binds to the arguments of a configurable."""
  values = {}
  pattern = _BINDING.format(configurable=configurable)
  for name, value in re.findall(pattern, text, re.MULTILINE):
    # Macros and references are not literals.
    with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
      values[name] = ast.literal_eval(value)
  return values
