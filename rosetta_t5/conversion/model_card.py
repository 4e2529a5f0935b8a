"""The model card of a converted model: README.md with the metadata that model hubs read."""

from __future__ import annotations

import contextlib
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from etils import epath

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.formats.hugging_face import folder as hugging_face_folder

FILE = "README.md"
# {how the name of a class of Transformers ends: (the task of its pipeline, what it is)}
_KINDS = {
  "ForConditionalGeneration": ("text2text-generation", "an encoder-decoder model"),
  "LMHeadModel": ("text-generation", "a decoder-only model"),
  "ForCausalLM": ("text-generation", "a decoder-only model"),
  "EncoderModel": ("feature-extraction", "an encoder"),
}
_GENERATE = "print(tokenizer.decode(model.generate(**inputs)[0], skip_special_tokens=True))"
_ENCODE = "print(model(**inputs).last_hidden_state.shape)"
# The entries of config.json that the card lists.
_SIZES = (
  *("num_layers", "n_layer", "num_decoder_layers", "d_model", "hidden_size", "n_embd", "num_heads"),
  *("n_head", "d_kv", "d_ff", "n_positions", "max_position_embeddings", "vocab_size", "dtype"),
)
_LICENSE_COMMENT = "# license: set its identifier, such as apache-2.0, before you publish the model"
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # a path on somebody's machine has more slashes
_TEMPLATE = pathlib.Path(__file__).with_name("model_card.md")


def write(
  folder: epath.Path,
  name: str,
  source: epath.Path,
  source_config: Mapping[str, Any],
  arrays: Mapping[str, StoredArray],
  verified: str,
) -> None:
  """Writes the model card of a folder that `convert` has written for Transformers.

  Language, license and base model are those that the source states. They are never guessed.

  Args:
    source: the converted checkpoint. If it belongs to a run, the card contains the run's config.gin.
    source_config: the config.json that the model came with; or {}.
    verified: a sentence about the comparison of the two models.
  """
  config = hugging_face_folder.read_config(folder / hugging_face_folder.CONFIG)
  (architecture,) = config["architectures"]
  pipeline, description = next(x for end, x in _KINDS.items() if architecture.endswith(end))
  step = int(arrays["state/step"].get()) if "state/step" in arrays else 0
  params = sum(array.size for name, array in arrays.items() if name.startswith("target/"))
  sizes = {"parameters": f"{params:,}"} | {key: config[key] for key in _SIZES if key in config}
  text = _TEMPLATE.read_text().format(
    metadata=_metadata(source, source_config, pipeline, config["model_type"]),
    name=name,
    description=description,
    model_type=config["model_type"],
    source=source.name,
    steps=f" after {step} training steps" if step else "",
    sizes="\n".join(f"| {what} | {size} |" for what, size in sizes.items()),
    vocabulary=_vocabulary(folder),
    training=_training(source),
    architecture=architecture,
    use=_ENCODE if pipeline == "feature-extraction" else _GENERATE,
    verified=verified,
  )
  (folder / FILE).write_text(text)


def _metadata(
  source: epath.Path, source_config: Mapping[str, Any], pipeline: str, model_type: str
) -> str:
  """Returns the YAML that hubs read, with what the source's own card states."""
  import yaml
  from huggingface_hub import ModelCard, ModelCardData

  known: Any = ModelCardData()
  if (source / FILE).exists():
    with contextlib.suppress(ValueError, yaml.YAMLError):  # It is not metadata that could be kept.
      known = ModelCard((source / FILE).read_text(), ignore_metadata_errors=True).data
  base = str(source_config.get("_name_or_path"))
  data = ModelCardData(
    language=known.get("language"),
    license=known.get("license"),
    base_model=known.get("base_model") or (base if _HUB_NAME.fullmatch(base) else None),
    library_name="transformers",
    pipeline_tag=pipeline,
    tags=[model_type, "t5" if "t5" in model_type else "gpt", "rosetta-t5"],
  )
  return data.to_yaml() if data.license else f"{data.to_yaml()}\n{_LICENSE_COMMENT}"


def _vocabulary(folder: epath.Path) -> str:
  files = [file.name for file in hugging_face_folder.tokenizer_files(folder)]
  names = ", ".join(f"`{name}`" for name in files if name != "generation_config.json")
  return f"The tokenizer's files: {names}." if names else "No tokenizer is included."


def _training(source: epath.Path) -> str:
  """Returns the run's configuration as a code block, from which no text of it can break out."""
  file = source.parent / "config.gin"
  if not file.exists():
    return "No configuration of the training run was found beside the checkpoint."
  text = file.read_text().strip()
  fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
  return f"The configuration of the training run:\n\n{fence}\n{text}\n{fence}"
