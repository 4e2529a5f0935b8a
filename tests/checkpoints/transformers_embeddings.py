"""Folders of tiny models whose encoders Transformers has run on texts, with the vectors that it computed.

`python tests/checkpoints/transformers_embeddings.py` records them (needs torch and transformers). Weights are
drawn by name, so that only their shapes are stored.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

sys.path.append(str(pathlib.Path(__file__).parents[1] / "networks"))
from transformers_families import ENCODER_DECODERS, T5GEMMA, VOCAB, draw

RECORDED = pathlib.Path(__file__).with_name("transformers_embeddings.json")
TEXTS = ["w5 w9 w30", "w12", "w7 w7 w31 w4 w22 w18 w10 w39 w6 w11 w13", ""]
_T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 2, "num_layers": 2, "vocab_size": VOCAB}
# Transformers 5.24 counts an encoder's window without the token itself.
_STACKS = {"encoder": T5GEMMA | {"sliding_window": 4}, "decoder": T5GEMMA}
_ENCODER = {"is_encoder_decoder": False}
# Name → (class of the model, the entries of its config.json).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
  "t5": ("T5ForConditionalGeneration", _T5 | {"model_type": "t5"}),
  "umt5": ("UMT5ForConditionalGeneration", _T5 | {"model_type": "umt5"}),
  "longt5": (
    "LongT5ForConditionalGeneration",
    ENCODER_DECODERS["longt5"][1] | {"model_type": "longt5", "vocab_size": VOCAB},
  ),
  "t5gemma": (
    "T5GemmaForConditionalGeneration",
    {"model_type": "t5gemma", "vocab_size": VOCAB, "is_encoder_decoder": True, **_STACKS},
  ),
  "encoder of t5": ("T5EncoderModel", _T5 | {"model_type": "t5"} | _ENCODER),
  "encoder of t5gemma": (
    "T5GemmaEncoderModel",
    {"model_type": "t5gemma", "vocab_size": VOCAB, **_ENCODER, **_STACKS},
  ),
  "sentence-t5": ("T5EncoderModel", _T5 | {"model_type": "t5"} | _ENCODER),
}
_PROJECTION = draw("projection", (6, _T5["d_model"]))


def make_tokenizer(name: str) -> Tokenizer:
  """Returns the tokenizer of a model: Gemma's begins texts, and T5's ends them."""
  special = ["<pad>", "</s>", "<bos>", "<unk>"]
  words = [*special, *(f"w{n}" for n in range(len(special), VOCAB))]
  ids = {word: n for n, word in enumerate(words)}
  tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
  tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  template = ["<bos>", "$A"] if "t5gemma" in name else ["$A", "</s>"]
  tokenizer.post_processor = processors.TemplateProcessing(
    single=template, special_tokens=[(word, ids[word]) for word in ("<bos>", "</s>")]
  )
  tokenizer.add_special_tokens(special)
  return tokenizer


def write_folder(name: str, path: pathlib.Path) -> None:
  """Writes the folder of a model."""
  path.mkdir()
  shapes = json.loads(RECORDED.read_text())[name]["shapes"]
  save_file({key: draw(key, shape) for key, shape in shapes.items()}, path / "model.safetensors")
  model_cls, entries = MODELS[name]
  (path / "config.json").write_text(json.dumps(entries | {"architectures": [model_cls]}))
  make_tokenizer(name).save(str(path / "tokenizer.json"))
  about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
  (path / "tokenizer_config.json").write_text(json.dumps(about | {"model_max_length": 24}))
  if name == "sentence-t5":
    _write_modules(path)


def _write_modules(path: pathlib.Path) -> None:
  kinds = {
    "": "Transformer",
    "1_Pooling": "Pooling",
    "2_Dense": "Dense",
    "3_Normalize": "Normalize",
  }
  modules = [
    {"idx": n, "name": str(n), "path": folder, "type": f"sentence_transformers.models.{kind}"}
    for n, (folder, kind) in enumerate(kinds.items())
  ]
  (path / "modules.json").write_text(json.dumps(modules))
  (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20}))
  for folder in ("1_Pooling", "2_Dense"):
    (path / folder).mkdir()
  pooling = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
  (path / "1_Pooling/config.json").write_text(json.dumps(pooling))
  dense = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
  (path / "2_Dense/config.json").write_text(json.dumps(dense))
  save_file({"linear.weight": _PROJECTION}, path / "2_Dense/model.safetensors")


def record() -> None:
  """Writes the vectors of Transformers' encoders, of each text alone."""
  import torch
  import transformers

  recorded = {}
  for name, (model_cls, entries) in MODELS.items():
    cls = getattr(transformers, model_cls)
    config = cls.config_class(**entries, attn_implementation="eager")
    model = cls(config).eval()
    names = {key: tuple(x.shape) for key, x in model.state_dict().items() if "lm_head" not in key}
    if "shared.weight" in names:  # which the stacks' own names stand for too
      names = {key: x for key, x in names.items() if "embed_tokens" not in key}
    model.load_state_dict(
      {key: torch.tensor(draw(key, x)) for key, x in names.items()}, strict=False
    )
    encoder = getattr(model, "encoder", None) or model.get_encoder()
    tokenizer, vectors = make_tokenizer(name), {"mean": [], "first": []}
    for text in TEXTS:
      with torch.no_grad():
        ids = torch.tensor([tokenizer.encode(text).ids])
        hidden_SD = encoder(input_ids=ids).last_hidden_state[0]
        mean_D = hidden_SD.mean(0)
        if name == "sentence-t5":
          mean_D = torch.nn.functional.normalize(torch.tensor(_PROJECTION) @ mean_D, dim=0)
      for pooling, vector in {"mean": mean_D, "first": hidden_SD[0]}.items():
        vectors[pooling].append(vector.double().numpy().round(6).tolist())
    recorded[name] = {"shapes": names, "vectors": vectors}
  RECORDED.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")


def recorded_vectors(name: str, pooling: str) -> np.ndarray:
  """Returns the vectors of TEXTS, [N, D]."""
  return np.array(json.loads(RECORDED.read_text())[name]["vectors"][pooling])


if __name__ == "__main__":
  record()
