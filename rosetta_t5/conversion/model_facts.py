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
from rosetta_t5.checkpoints.formats.hugging_face import folder, gpt, t5
from rosetta_t5.checkpoints.formats.hugging_face.source_config import read_source_config
from rosetta_t5.config import model_file
from rosetta_t5.config.checks import declared_types
from rosetta_t5.networks.decoder_config import TransformerConfig
from rosetta_t5.networks.t5_config import T5Config

# A binding in a config.gin. Only a value in brackets may span several lines.
_BINDING = r"^(?:[\w./]+\.)?{configurable}\.(\w+)\s*=\s*\\?\s*(\([^)]*\)|\[[^]]*\]|.+)$"
# The vocabulary whose ids are one higher than those of the tokenizer's files.
_SHIFTED_VOCABULARY = re.compile(r"gpt2_vocabulary\b")


@dataclasses.dataclass(frozen=True)
class ModelFacts:
  """Facts about a model that its weights do not show.

  Attributes:
    network: the T5Config or TransformerConfig; None for a decoder without a config beside it, and for models
      that are neither T5 nor GPT.
    ids_are_shifted: whether ids are one higher than the tokenizer's, whose id 0 is not padding.
    source_config: the content of the config.json that the model came with; {} if there is none.
  """

  network: Any
  ids_are_shifted: bool = False
  source_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def is_gpt(self) -> bool:
    """Whether the model is a decoder."""
    return isinstance(self.network, TransformerConfig)


def read_facts(
  path: str | os.PathLike[str],
  arrays: Mapping[str, StoredArray],
  activations: tuple[str, ...] | None = None,
  config: str | os.PathLike[str] | None = None,
) -> ModelFacts:
  """Returns the facts about a checkpoint's model.

  Args:
    path: the checkpoint. Its settings are those of the run that wrote it (model.json or config.gin in
      the folder above), else those of the config.json that it came with, else T5X's.
    arrays: its arrays.
    activations: T5Config.mlp_activations, if the user sets them.
    config: a config.json or config.gin to read instead.

  Raises:
    ValueError: `config` does not exist, or does not describe such a model.
  """
  plain, source = to_plain_tree(arrays), read_source_config(path)
  file = epath.Path(config or epath.Path(path).parent / "config.gin")
  if config is not None and not file.exists():
    raise ValueError(f"--config {file}: there is no such file")
  text = ""
  if file.suffix == ".json":
    source = folder.read_config(file)
  elif file.exists() and not folder.is_hugging_face(path):
    text = _read_text(file)
  is_decoder = gpt.POSITIONS in plain
  if text:
    settings = _run_settings(file, text, "TransformerConfig" if is_decoder else "T5Config")
    network = _make_network(file, plain, settings)
    is_shifted = is_decoder and (
      network.padding_never_follows or bool(_SHIFTED_VOCABULARY.search(text))
    )
  elif source:
    network = _make_network(file, plain, folder.network_settings(file, source, plain))
    is_shifted = is_decoder and not source.get(gpt.PADDING_IS_TOKEN_0)
  else:
    network = None if is_decoder else _make_network(file, plain, {})
    is_shifted = False
  if activations and network is not None:
    network = dataclasses.replace(network, mlp_activations=activations)
  return ModelFacts(network, is_shifted, source)


def _run_settings(file: epath.Path, text: str, name: str) -> dict[str, Any]:
  """Returns the fields of a network's config in the run that has written `file`, a config.gin."""
  described = file.with_name(model_file.NAME)
  if described.exists() and (found := model_file.read_network_config(pathlib.Path(described))):
    return found
  settings = _read_literals(text, name)
  if name == "TransformerConfig" and "num_heads" not in settings:
    raise ValueError(
      f"{file} does not bind TransformerConfig.num_heads: set --config to the config.gin of the run "
      "that trained this model, or to the config.json that it came with"
    )
  return settings


def _make_network(
  file: epath.Path, arrays: Mapping[str, StoredArray], settings: Mapping[str, Any]
) -> Any:
  """Returns the network's config: the sizes of the arrays, and settings, which must have the fields' types.

  None stands for a model that is neither T5 nor GPT.
  """
  is_gpt = gpt.POSITIONS in arrays
  cls: Any = TransformerConfig if is_gpt else T5Config
  try:
    derived = gpt.sizes(arrays) if is_gpt else t5.network_settings({}, arrays)
  except (KeyError, ValueError):
    return None
  types = typing.get_type_hints(cls, include_extras=True)
  fields = {name: value for name, value in settings.items() if name in types}
  for name, value in fields.items():
    if not declared_types.accepts(value, types[name]):
      raise ValueError(
        f"{file}: {name} must be {declared_types.describe(types[name])}, got {value!r}"
      )
  # The sizes are those of the weights, whatever a config says.
  values = {**derived, **fields, **(gpt if is_gpt else t5).sizes(arrays)}
  if "mlp_activations" in values:
    values["mlp_activations"] = tuple(values["mlp_activations"])
  return cls(**values)


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
