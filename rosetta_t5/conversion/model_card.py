"""The model card of a converted model: README.md with the metadata that model hubs read."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.formats.hugging_face import folder as hugging_face_folder

FILE = "README.md"


class _Kind(NamedTuple):
  """What the name of a class of Transformers says about its models."""

  pipeline: str
  description: str
  use: str = "print(tokenizer.decode(model.generate(**inputs)[0], skip_special_tokens=True))"


_KINDS = {
  "ForConditionalGeneration": _Kind("text2text-generation", "encoder-decoder model"),
  "LMHeadModel": _Kind("text-generation", "decoder-only model"),
  "ForCausalLM": _Kind("text-generation", "decoder-only model"),
  "EncoderModel": _Kind(
    "feature-extraction", "encoder", "print(model(**inputs).last_hidden_state.shape)"
  ),
}
_SIZES = {
  "num_layers": "layers",
  "n_layer": "layers",
  "num_decoder_layers": "decoder layers",
  "d_model": "width",
  "hidden_size": "width",
  "n_embd": "width",
  "num_heads": "attention heads",
  "n_head": "attention heads",
  "d_kv": "width of a head",
  "d_ff": "width of a feed-forward block",
  "n_positions": "positions",
  "max_position_embeddings": "positions",
  "vocab_size": "rows of the embedding table",
  "dtype": "type of the parameters",
}
_LICENSE_COMMENT = "# license: set its identifier, such as apache-2.0, before you publish the model"
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # a path on somebody's machine has more slashes
_CARD = """\
---
{metadata}
---

# {name}

This is {article} {kind.description} ({model_type}). rosetta-t5 converted it from the checkpoint `{source}`{steps}.

## Sizes

| | |
| --- | --- |
{sizes}

## Vocabulary

{vocabulary}

## Training

{training}

## Use

```python
from transformers import AutoTokenizer, {architecture}

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = {architecture}.from_pretrained("{name}")
inputs = tokenizer("Write your text here.", return_tensors="pt")
{kind.use}
```

## Verification

The converted model was compared with the checkpoint:

{verified}
"""


def write(
  folder: epath.Path,
  name: str,
  source: epath.Path,
  source_config: Mapping[str, Any],
  arrays: Mapping[str, StoredArray],
  verified: Sequence[str],
) -> None:
  """Writes the model card of a folder that `convert` has written for Transformers.

  Language, license and base model are those that the source states. They are never guessed.

  Args:
    source: the converted checkpoint. If it belongs to a run, the card contains the run's config.gin.
    source_config: the config.json that the model came with; or {}.
    verified: sentences about the comparison of the two models.
  """
  config = hugging_face_folder.read_config(folder / hugging_face_folder.CONFIG)
  (architecture,) = config["architectures"]
  kind = next(kind for suffix, kind in _KINDS.items() if architecture.endswith(suffix))
  step = int(arrays["state/step"].get()) if "state/step" in arrays else 0
  params = sum(array.size for name, array in arrays.items() if name.startswith("target/"))
  sizes = {"parameters": f"{params:,}"}
  sizes |= {what: config[key] for key, what in _SIZES.items() if key in config}
  text = _CARD.format(
    metadata=_metadata(source, source_config, kind, config["model_type"]),
    name=name,
    article="an" if kind.description.startswith("e") else "a",
    kind=kind,
    model_type=config["model_type"],
    source=source.name,
    steps=f" after {step} training steps" if step else "",
    sizes="\n".join(f"| {what} | {size} |" for what, size in sizes.items()),
    vocabulary=_vocabulary(folder),
    training=_training(source),
    architecture=architecture,
    verified="\n".join(f"- {sentence}" for sentence in verified),
  )
  (folder / FILE).write_text(text)


def _metadata(
  source: epath.Path, source_config: Mapping[str, Any], kind: _Kind, model_type: str
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
    pipeline_tag=kind.pipeline,
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
