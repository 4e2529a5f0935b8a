"""The settings of a checkpoint's model that its weights do not show, read from the config beside it."""

import ast
import contextlib
import dataclasses
import pathlib
import re
from typing import Any

from etils import epath

from rosetta_t5.checkpoints.arrays.parameter_trees import to_plain_tree
from rosetta_t5.checkpoints.formats.hugging_face import folder
from rosetta_t5.checkpoints.formats.hugging_face.families import find_family
from rosetta_t5.checkpoints.formats.hugging_face.name_tables import UNKNOWN_HEADS, Arrays, Config
from rosetta_t5.checkpoints.run_start import read_source_config
from rosetta_t5.config import model_file
from rosetta_t5.networks.config import T5Config, TransformerConfig

# A binding in a config.gin. Only a value in brackets may span several lines.
_BINDING = (
  r"^(?:[\w./]+\.)?{configurable}\.(\w+)\s*=\s*\\?\s*(\([^)]*\)|\[[^]]*\]|\{{[^}}]*\}}|.+)$"
)
# The vocabulary whose ids are one higher than those of the tokenizer's files.
_SHIFTED_VOCABULARY = re.compile(r"gpt2_vocabulary\b")


@dataclasses.dataclass(frozen=True)
class ModelSettings:
  """The settings of a model that its weights do not show.

  Attributes:
    network: the T5Config or TransformerConfig; None for a decoder without a config beside it, and for models
      that are neither T5 nor GPT.
    source_config: the content of the config.json that the model came with; {} if there is none.
  """

  network: Any
  source_config: Config

  @property
  def is_decoder(self) -> bool:
    """Whether the model is a decoder without an encoder."""
    return isinstance(self.network, TransformerConfig)

  @property
  def ids_are_shifted(self) -> bool:
    """Whether ids are one higher than the tokenizer's, whose id 0 is not padding."""
    return self.is_decoder and self.network.padding_never_follows


def read_model_settings(
  path: epath.PathLike, arrays: Arrays, config: epath.PathLike | None = None
) -> ModelSettings:
  """Returns the settings of a checkpoint's model.

  Args:
    path: the checkpoint. Its settings are those of the run that wrote it (model.json or config.gin in
      the folder above), else those of the config.json that it came with, else T5X's.
    arrays: its arrays.
    config: a config.json or config.gin to read instead.

  Raises:
    ValueError: `config` does not exist, or does not describe such a model.
  """
  plain = to_plain_tree(arrays)
  file = epath.Path(config or epath.Path(path).parent / "config.gin")
  if config is not None and not file.exists():
    raise ValueError(f"--config {file}: there is no such file")
  is_json = file.suffix == ".json"
  source = folder.read_config(file) if is_json else read_source_config(path)
  is_run = file.exists() and not is_json and not folder.is_hugging_face(path)
  text = file.read_bytes().decode(errors="replace") if is_run else ""
  network = _read_network(plain, file, text, source)
  if isinstance(network, TransformerConfig) and _SHIFTED_VOCABULARY.search(text):
    network = dataclasses.replace(network, padding_never_follows=True)
  return ModelSettings(network, source)


def _read_network(plain: Arrays, file: epath.Path, text: str, source: Config) -> Any:
  """Returns the config of a model's network, as `ModelSettings.network`.

  Args:
    plain: the model's arrays in the plain tree.
    file: the config.gin or config.json.
    text: the text of a config.gin; or "".
    source: the content of a config.json; or {}.
  """
  family = find_family(plain)
  cls: Any = TransformerConfig if family.IS_DECODER else T5Config
  try:
    sizes = family.sizes(plain)
  except (LookupError, ValueError):  # It is neither a T5 nor a GPT.
    return None
  if not (text or source or not family.IS_DECODER):
    return None  # Weights do not show a decoder's heads.
  settings = {} if family.IS_DECODER else family.network_settings({}, plain)
  if text:
    settings |= _run_settings(file, text, cls.__name__)
  elif source:
    settings |= folder.network_settings(file, source, plain)
  settings |= sizes
  names = {field.name for field in dataclasses.fields(cls)} & settings.keys()
  try:
    return cls(**{n: tuple(x) if isinstance(x := settings[n], list) else x for n in names})
  except (TypeError, ValueError) as error:
    raise ValueError(f"{file}: {error}") from error


def _run_settings(file: epath.Path, text: str, name: str) -> dict[str, Any]:
  """Returns the fields of a network's config in the run that has written `file`, a config.gin."""
  described = file.with_name(model_file.NAME)
  if described.exists() and (found := model_file.read_network_config(pathlib.Path(described))):
    return found
  settings = {}
  for field, value in re.findall(_BINDING.format(configurable=name), text, re.MULTILINE):
    with contextlib.suppress(ValueError, SyntaxError):  # Macros and references are not literals.
      settings[field] = ast.literal_eval(value)
  if name == "TransformerConfig" and "num_heads" not in settings:
    raise ValueError(f"{file} does not bind TransformerConfig.num_heads: {UNKNOWN_HEADS}")
  return settings
