"""Tiny models with prompts, as PEFT's prompt tuning computes them.

`python tests/networks/peft_prompts.py` records PEFT's logits (needs torch, transformers and peft). Weights and
prompts are drawn by name, so that both sides have the same without a file of weights.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
from transformers_families import ENCODER_DECODERS, FAMILIES, draw, fill

RECORDED = pathlib.Path(__file__).with_name("peft_prompts.json")
VOCAB, LENGTH, PROMPT_LENGTH, WIDTH = 40, 14, 5, 32
_T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2}
_GPT2 = {"n_embd": WIDTH, "n_head": 4, "n_layer": 2, "n_positions": LENGTH + PROMPT_LENGTH}

# Name → (class of the model, the entries of its config).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
  "t5": ("T5ForConditionalGeneration", _T5 | {"feed_forward_proj": "gated-gelu"}),
  "longt5": ("LongT5ForConditionalGeneration", ENCODER_DECODERS["longt5"][1]),
  "gpt2": ("GPT2LMHeadModel", _GPT2 | {"bos_token_id": 39, "eos_token_id": 39}),
  "gemma3": ("Gemma3ForCausalLM", FAMILIES["gemma3"][1]),
}


def prompt() -> np.ndarray:
  """Returns the vectors of the prompt."""
  return draw("prompt", (PROMPT_LENGTH, WIDTH))


def tokens() -> np.ndarray:
  """Returns two texts; the second ends with three padding tokens."""
  ids = np.random.default_rng(0).integers(1, VOCAB - 1, (2, LENGTH))
  ids[1, -3:] = 0
  return ids


def targets() -> np.ndarray:
  """Returns the texts that decoders of encoder-decoders read."""
  return np.random.default_rng(1).integers(1, VOCAB - 1, (2, LENGTH))


def record() -> None:
  """Writes PEFT's logits."""
  import peft
  import torch
  import transformers

  models = {}
  for name, (kind, entries) in MODELS.items():
    config_cls = getattr(transformers, kind).config_class
    config = config_cls(**{"vocab_size": VOCAB, **entries}, attn_implementation="eager")
    model = getattr(transformers, kind)(config).eval()
    fill(model)
    shapes = {n: tuple(x.shape) for n, x in model.named_parameters()}
    is_decoder = "Conditional" not in kind
    task = "CAUSAL_LM" if is_decoder else "SEQ_2_SEQ_LM"
    settings = peft.PromptTuningConfig(
      task_type=task, num_virtual_tokens=PROMPT_LENGTH, num_transformer_submodules=1
    )
    model = peft.get_peft_model(model, settings).eval()
    model.prompt_encoder["default"].embedding.weight.data = torch.tensor(prompt())
    ids = torch.tensor(tokens())
    options = {} if is_decoder else {"decoder_input_ids": torch.tensor(targets())}
    with torch.no_grad():
      logits = model(input_ids=ids, attention_mask=(ids != 0).long(), **options).logits
    logits = logits[:, -LENGTH:, ::5].double().numpy().round(6)
    models[name] = {
      "config": json.loads(config.to_json_string()),
      "shapes": shapes,
      "every fifth logit": logits.tolist(),
    }
  RECORDED.write_text(json.dumps({"peft": peft.__version__, "models": models}) + "\n")


if __name__ == "__main__":
  record()
