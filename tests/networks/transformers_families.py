"""Tiny models of families that this project has no recipes for, in Transformers and as our networks.

`python tests/networks/transformers_families.py` records Transformers' logits (needs torch and transformers).
Weights are drawn by name, so that both sides have the same without a file of weights.
"""

from __future__ import annotations

import json
import pathlib
import zlib
from typing import Any

import numpy as np

RECORDED = pathlib.Path(__file__).with_name("transformers_families.json")
VOCAB, LENGTH = 40, 14
SIZES: dict[str, Any] = {
  "vocab_size": VOCAB,
  "hidden_size": 32,
  "num_hidden_layers": 4,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 8,
  "intermediate_size": 48,
  "max_position_embeddings": 64,
  "pad_token_id": 0,
}
LLAMA3 = {
  "rope_type": "llama3",
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 16,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2

# Family → (class of the config, its arguments).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
  "llama": (
    "LlamaConfig",
    SIZES | {"rope_parameters": {"rope_theta": 5e3, **LLAMA3}, "tie_word_embeddings": False},
  ),
  "qwen2": ("Qwen2Config", SIZES | {"tie_word_embeddings": True}),
  "gemma2": (
    "Gemma2Config",
    SIZES
    | {
      "sliding_window": 5,
      "layer_types": ALTERNATING,
      "query_pre_attn_scalar": 12,
      "attn_logit_softcapping": 3.0,
      "final_logit_softcapping": 4.0,
    },
  ),
  "gemma3": (
    "Gemma3TextConfig",
    SIZES
    | {
      "sliding_window": 5,
      "layer_types": ALTERNATING,
      "query_pre_attn_scalar": 12,
      "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
      },
    },
  ),
  "cohere": (
    "CohereConfig",
    SIZES | {"logit_scale": 0.25, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
  ),
}

# T5Gemma's encoder and decoder, each with a table of its own.
T5GEMMA = FAMILIES["gemma2"][1] | {
  "num_hidden_layers": 2,
  "layer_types": ALTERNATING[:2],
  "dropout_rate": 0.0,
}
T5GEMMA |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


_IMAGES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "patch_size": 14}
_IMAGES |= {"num_attention_heads": 1, "image_size": 14}
_T5GEMMA2 = FAMILIES["gemma3"][1]
_LONGT5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2}
# Family → (class of the model, the entries of its config.json).
ENCODER_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
  "t5gemma2": (
    "T5Gemma2",
    {
      "encoder": {"text_config": _T5GEMMA2, "vision_config": _IMAGES, "eoi_token_index": 7}
      | {"boi_token_index": 38, "image_token_index": 39, "mm_tokens_per_image": 1},
      "decoder": _T5GEMMA2,
      "eoi_token_index": 7,
    },
  ),
  "longt5": (
    "LongT5",
    _LONGT5
    | {"encoder_attention_type": "transient-global", "local_radius": 2, "global_block_size": 4}
    | {"feed_forward_proj": "gated-gelu", "scale_decoder_outputs": True},
  ),
}


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
  """Returns the weights of this name."""
  rng = np.random.default_rng(zlib.crc32(name.encode()))
  return (rng.normal(size=shape) / 4 + ("norm" in name)).astype(np.float32)


def tokens() -> np.ndarray:
  """Returns two texts without padding."""
  return np.random.default_rng(0).integers(1, VOCAB, (2, LENGTH))


def fill(model: Any) -> None:
  """Draws the weights of a model of PyTorch."""
  import torch

  for name, weight in model.named_parameters():
    weight.data = torch.tensor(draw(name, tuple(weight.shape)))


def record() -> None:
  """Writes the logits of Transformers' models."""
  import torch
  import transformers

  logits = {}
  for family, (config_cls, arguments) in FAMILIES.items():
    arguments = {k: v for k, v in arguments.items() if family != "cohere" or k != "head_dim"}
    config = getattr(transformers, config_cls)(**arguments, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    fill(model)
    with torch.no_grad():
      found = model(torch.tensor(tokens())).logits
    logits[family] = found[:, ::3, ::5].double().numpy().round(6).tolist()
  # Transformers 5.24 counts an encoder's window without the token itself.
  sides = {"encoder": T5GEMMA | {"sliding_window": 4}, "decoder": T5GEMMA}
  config = transformers.T5GemmaConfig(
    **sides, vocab_size=VOCAB, attn_implementation="eager", pad_token_id=0, dropout_rate=0.0
  )
  model = transformers.T5GemmaForConditionalGeneration(config).eval()
  fill(model)
  with torch.no_grad():
    inputs, targets = torch.tensor(tokens()), torch.tensor(tokens()[:, ::-1].copy())
    found = model(input_ids=inputs, decoder_input_ids=targets).logits
  logits["t5gemma"] = found[:, ::3, ::5].double().numpy().round(6).tolist()
  described = {}
  for family, (kind, entries) in ENCODER_DECODERS.items():
    config = getattr(transformers, f"{kind}Config")(
      **entries, vocab_size=VOCAB, attn_implementation="eager"
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    shapes = {}
    for name, weight in model.named_parameters():
      name = name.replace("encoder.text_model.", "encoder.")  # as folders name it
      weight.data = torch.tensor(draw(name, tuple(weight.shape)))
      if "vision" not in name and "multi_modal" not in name:
        shapes[name] = tuple(weight.shape)
    with torch.no_grad():
      found = model(input_ids=inputs, decoder_input_ids=targets).logits
    logits[family] = found[:, ::3, ::5].double().numpy().round(6).tolist()
    described[family] = shapes
  content = {
    "shapes of weights": described,
    "transformers": transformers.__version__,
    "every third position and fifth logit": logits,
  }
  RECORDED.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
  record()
