"""Tiny random models of Transformers, and adapters of them as PEFT makes and saves them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from todays_models import GEMMA2, INPUTS, SIZES, TARGETS, VOCAB, WIDE, fill, start_of

from rosetta_t5.checkpoints import adapter_checkpoints
from rosetta_t5.checkpoints.formats.hugging_face import peft_folder
from rosetta_t5.conversion import verification
from rosetta_t5.conversion.model_settings import read_model_settings

_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2, "vocab_size": VOCAB}
_GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": VOCAB}
_IDS = {"bos_token_id": 39, "eos_token_id": 39}
# Name → (class of the model, the entries of its config).
BASES: dict[str, tuple[str, dict[str, Any]]] = {
  "t5": (
    "T5ForConditionalGeneration",
    _T5 | {"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0},
  ),
  "t5gemma": (
    "T5GemmaForConditionalGeneration",
    {"vocab_size": VOCAB, "encoder": SIZES | GEMMA2 | WIDE, "decoder": SIZES | GEMMA2},
  ),
  "llama": ("LlamaForCausalLM", SIZES | {"attention_bias": True, "bos_token_id": 5}),
  "gpt2": ("GPT2LMHeadModel", _GPT2 | _IDS),
}
# Name → (the attention's targets, those of the feed-forward block).
TARGETS_OF = {
  "t5": (["q", "v", "EncDecAttention.k"], ["wi_1", "wo"]),
  "t5gemma": (["q_proj", "v_proj"], ["down_proj"]),
  "llama": (["q_proj", "v_proj"], ["down_proj"]),
  "gpt2": (["c_attn"], ["mlp.c_proj"]),
}
_PATTERNS = {
  "t5": {"encoder.block.1.layer.0.SelfAttention.q": 5, "wo": 2},
  "t5gemma": {"decoder.layers.1.self_attn.q_proj": 5, "down_proj": 2},
  "llama": {r"model.layers.[01].self_attn.v_proj": 5, "down_proj": 2},
  "gpt2": {"h.1.attn.c_attn": 5, "c_proj": 2},
}
METHODS = ("lora", "rslora", "dora", "patterns", "regex", "ia3", "ia3 of inputs", "prompt")


def save_base(name: str, path: Any) -> None:
  """Saves a model with Transformers."""
  import torch
  import transformers

  kind, entries = BASES[name]
  cls = getattr(transformers, kind)
  model = cls(cls.config_class(**entries, attn_implementation="eager")).eval()
  fill(model)
  torch.manual_seed(0)
  model.save_pretrained(path)


def load_base(name: str, path: Any) -> Any:
  """Returns the model of a folder, by Transformers."""
  import transformers

  cls = getattr(transformers, BASES[name][0])
  return cls.from_pretrained(os.fspath(path), attn_implementation="eager").eval()


def peft_config(name: str, method: str) -> Any:
  """Returns PEFT's config of a method for a model."""
  import peft

  attention, mlp = TARGETS_OF[name]
  is_decoder = "CausalLM" in BASES[name][0] or "LMHead" in BASES[name][0]
  common = {"task_type": "CAUSAL_LM" if is_decoder else "SEQ_2_SEQ_LM"}
  fan = {"fan_in_fan_out": name == "gpt2"}
  if method == "prompt":
    # T5 has PEFT's default, whose second half is not used.
    sizes = {"num_virtual_tokens": 5, "num_transformer_submodules": None if name == "t5" else 1}
    if name == "t5gemma":  # in whose config PEFT does not find them
      sizes |= {"num_layers": 3, "num_attention_heads": 6, "token_dim": 48}
    return peft.PromptTuningConfig(**common, **sizes)
  if method.startswith("ia3"):
    inputs = mlp if method == "ia3 of inputs" else []
    targets = {"target_modules": attention + mlp, "feedforward_modules": inputs}
    return peft.IA3Config(**common, **targets, **fan)
  settings: dict[str, Any] = {"target_modules": attention + mlp, "r": 4, "lora_alpha": 6}
  settings["use_rslora"] = method == "rslora"
  settings["use_dora"] = method == "dora"
  if method == "patterns":
    settings["rank_pattern"] = _PATTERNS[name]
    settings["alpha_pattern"] = dict.fromkeys([*_PATTERNS[name]][:1], 7)
  if method == "regex":
    settings["target_modules"] = rf".*\.1\..*({'|'.join(attention[:1] + mlp[:1])})"
  return peft.LoraConfig(**common, **settings, **fan)


def save_adapter(name: str, method: str, base: Any, path: Any) -> Any:
  """Saves an adapter whose tensors are all drawn, and returns PEFT's model."""
  import peft
  import torch

  model = peft.get_peft_model(load_base(name, base), peft_config(name, method)).eval()
  random = torch.Generator().manual_seed(1)
  with torch.no_grad():
    for key, weight in model.named_parameters():
      if any(part in key for part in ("lora_", "ia3_", "prompt_encoder")):
        drawn = torch.randn(weight.shape, generator=random) / 5
        weight.copy_(1 + drawn if "ia3" in key or "magnitude" in key else drawn)
  model.save_pretrained(path)
  return model


def their_logits(model: Any, base: Any) -> np.ndarray:
  """Returns the logits of the first example, by Transformers or PEFT."""
  import torch

  is_decoder = not model.config.is_encoder_decoder
  targets = torch.tensor([[start_of(base), *TARGETS[0][:-1]]])
  ids = {"input_ids": targets if is_decoder else torch.tensor(INPUTS[:1])}
  ids |= {} if is_decoder else {"decoder_input_ids": targets}
  with torch.no_grad():
    result: np.ndarray = model(**ids).logits[:, -targets.shape[1] :].numpy()
  return result


def our_logits(path: Any, is_merged: bool = False) -> np.ndarray:
  """Returns the logits of the first example, by this project's network, for a PEFT folder."""
  adapter, arrays = peft_folder.read_with_base(path)
  if is_merged:
    arrays = adapter_checkpoints.merge(arrays, adapter.settings())
  return logits_of(None if is_merged else adapter, arrays, path)


def logits_of(adapter: Any, arrays: Any, path: Any) -> np.ndarray:
  """Returns the logits of the first example for arrays; the folder at `path` has the settings."""
  settings = read_model_settings(path, arrays)
  shift = int(settings.ids_are_shifted)
  targets = np.array([[0, *(token + shift for token in TARGETS[0][:-1])]])
  found = verification.network_outputs(arrays, settings, (np.array(INPUTS[:1]), targets), adapter)
  return found[..., shift : shift + VOCAB]
