"""Tiny random models of today's families, as Transformers saves them, and the same models here.

The table has one model of each shape that the families allow. Transformers computes eagerly in float32.
"""

from __future__ import annotations

import json
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from rosetta_t5.checkpoints.formats.hugging_face import folder
from rosetta_t5.conversion.model_settings import read_model_settings
from rosetta_t5.decoding import beam_search, temperature_sample
from rosetta_t5.models import DecoderOnlyModel, EncoderDecoderModel
from rosetta_t5.networks.transformer import DecoderWrapper, Transformer

VOCAB, LENGTH = 40, 16
SIZES: dict[str, Any] = {
  "vocab_size": VOCAB,
  "hidden_size": 32,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 8,
  "intermediate_size": 48,
  "max_position_embeddings": 64,
}
LLAMA3 = {
  "rope_type": "llama3",
  "rope_theta": 5e3,
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 16,
}
GEMMA2 = {"sliding_window": 5, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 3.0}
GEMMA2 |= {"final_logit_softcapping": 4.0}
ROPES = {
  "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
  "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
WIDE = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10}
WIDE |= {"intermediate_size": 64, "num_hidden_layers": 4, "query_pre_attn_scalar": 16}

# Name → (class of the config, its entries; of T5Gemma: encoder, decoder, others).
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
  "llama": ("Llama", {"rope_parameters": LLAMA3, "bos_token_id": 5, "eos_token_id": [6, 7]}),
  "llama with biases": (
    "Llama",
    {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "head_dim": 6}
    | {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
  ),
  "llama with padding": ("Llama", {"pad_token_id": 0, "num_key_value_heads": 4}),
  "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
  "qwen2 with windows": (
    "Qwen2",
    {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 3},
  ),
  "qwen3": ("Qwen3", {"head_dim": 12, "tie_word_embeddings": True, "eos_token_id": 4}),
  "qwen3 with biases": ("Qwen3", {"attention_bias": True, "num_key_value_heads": 1}),
  "gemma2": ("Gemma2", GEMMA2),
  "gemma2 without limits": (
    "Gemma2",
    {"sliding_window": 4, "attn_logit_softcapping": None, "final_logit_softcapping": None}
    | {"tie_word_embeddings": False, "pad_token_id": None, "hidden_activation": "gelu"},
  ),
  "gemma3": (
    "Gemma3Text",
    {"num_hidden_layers": 7, "sliding_window": 4, "rope_parameters": ROPES}
    | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
  ),
  "t5gemma": ("T5Gemma", {"encoder": GEMMA2, "decoder": GEMMA2}),
  "t5gemma with a larger encoder": ("T5Gemma", {"encoder": GEMMA2 | WIDE, "decoder": GEMMA2}),
  "t5gemma with a larger decoder": (
    "T5Gemma",
    {"encoder": GEMMA2, "decoder": GEMMA2 | WIDE, "tie_word_embeddings": False},
  ),
}
T5GEMMA2 = {"num_hidden_layers": 7, "sliding_window": 5, "rope_parameters": ROPES}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "patch_size": 14}
VISION |= {"num_attention_heads": 2, "image_size": 28}
SHAPES["t5gemma2"] = ("T5Gemma2", {"encoder": T5GEMMA2, "decoder": T5GEMMA2})
SHAPES["t5gemma2 with even windows"] = (
  "T5Gemma2",
  {
    "encoder": T5GEMMA2 | {"sliding_window": 6, "num_hidden_layers": 2, "num_key_value_heads": 4},
    "decoder": T5GEMMA2 | {"sliding_window": 4, "final_logit_softcapping": 4.0},
  },
)
LONG = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2, "vocab_size": VOCAB}
LONG |= {"local_radius": 2, "global_block_size": 4, "relative_attention_num_buckets": 8}
LONG |= {"relative_attention_max_distance": 12, "decoder_start_token_id": 0}
SHAPES["longt5"] = ("LongT5", LONG | {"feed_forward_proj": "gated-gelu"})
SHAPES["longt5 with blocks"] = (
  "LongT5",
  LONG
  | {
    "encoder_attention_type": "transient-global",
    "tie_word_embeddings": False,
  },
)
END_OF_IMAGE = 31  # a token of INPUTS
INPUTS = [[9, 4, 31, 17, 22, 8, 15, 30, 12, 3, 27, 19, 33], [14, 6, 21, 35, 10, 28, 7, 11]]
TARGETS = [[13, 5, 24, 38, 16, 9, 29, 2, 34, 18, 25], [20, 37, 4, 26, 32, 8, 1, 12]]


def save(name: str, path: Any) -> Any:
  """Saves a model of SHAPES with Transformers, and returns it."""
  return save_model(*SHAPES[name], path)


def save_model(kind: str, entries: dict[str, Any], path: Any) -> Any:
  """Saves a model with Transformers, and returns it."""
  import torch
  import transformers

  stacks = {side: SIZES | x for side, x in entries.items() if side in ("encoder", "decoder")}
  has_sizes = kind.endswith("T5") or stacks
  entries = {**({"vocab_size": VOCAB} if has_sizes else SIZES), **entries, **stacks}
  if kind == "T5Gemma2":
    images = {"vision_config": VISION, "boi_token_index": 36, "image_token_index": 37}
    stacks["encoder"] = {"text_config": stacks["encoder"], **images, "mm_tokens_per_image": 1}
    stacks["encoder"]["eoi_token_index"] = END_OF_IMAGE
    entries |= {"eoi_token_index": END_OF_IMAGE, "image_token_index": 37, **stacks}
  config = getattr(transformers, f"{kind}Config")(**entries, attn_implementation="eager")
  suffix = "ForConditionalGeneration" if has_sizes else "ForCausalLM"
  suffix = "LMHeadModel" if kind == "GPT2" else suffix
  model = getattr(transformers, kind.removesuffix("Text") + suffix)(config).eval()
  fill(model)
  model.generation_config.eos_token_id = None
  torch.manual_seed(0)
  model.save_pretrained(path)
  return model


def fill(model: Any) -> None:
  """Draws all weights, those of norms too."""
  import torch

  random = torch.Generator().manual_seed(0)
  with torch.no_grad():
    for name, weight in model.named_parameters():
      weight.copy_(torch.randn(weight.shape, generator=random) / 4 + 0.3 * ("norm" in name))


def read(path: Any) -> types.SimpleNamespace:
  """Returns the model of a folder here: `model`, `params`, `settings`, `shift` of ids."""
  arrays = folder.read_arrays(path)
  settings = read_model_settings(path, arrays)
  config = settings.network.replace(dropout_rate=0.0)
  vocabulary = types.SimpleNamespace(eos_id=VOCAB + 5)  # no text ends
  if settings.is_decoder:
    arguments: Any = (DecoderWrapper(config), vocabulary, None, temperature_sample)
    model: Any = DecoderOnlyModel(*arguments, feature_converter_cls=object)
  else:
    arguments = (Transformer(config), vocabulary, vocabulary, None)
    model = EncoderDecoderModel(*arguments, feature_converter_cls=object)
  params = unflatten_dict(
    {name.removeprefix("target/"): jnp.asarray(x.get()) for name, x in arrays.items()}, sep="/"
  )
  shift = int(settings.ids_are_shifted)
  return types.SimpleNamespace(
    model=model, params=params, settings=settings, shift=shift, path=path
  )


def pad(rows: list[list[int]], on_left: bool = False, length: int = LENGTH) -> np.ndarray:
  """Returns rows of one length; padding is 0."""
  empty = [[0] * (length - len(row)) for row in rows]
  pairs = zip(rows, empty, strict=True)
  return np.array([zeros + row if on_left else row + zeros for row, zeros in pairs])


def batch_of(found: Any, on_left: bool = False) -> dict[str, jax.Array]:
  """Returns a batch of both examples; on the left or right of each row is padding."""
  shifted = [[token + found.shift for token in row] for row in TARGETS]
  targets = pad(shifted, on_left)
  inputs = pad([[0, *row[:-1]] for row in shifted], on_left)  # 0 starts texts
  batch = {"decoder_target_tokens": targets, "decoder_input_tokens": inputs}
  if not found.settings.is_decoder:
    batch["encoder_input_tokens"] = pad(INPUTS, on_left)
  return {name: jnp.asarray(value) for name, value in batch.items()}


def packed_batch(found: Any) -> dict[str, jax.Array]:
  """Returns a batch of one row, which contains both examples."""

  def join(rows: list[list[int]]) -> np.ndarray:
    return pad([[x for row in rows for x in row]], length=2 * LENGTH)

  def describe(side: str, rows: list[list[int]]) -> dict[str, np.ndarray]:
    return {
      f"{side}_segment_ids": join([[n + 1] * len(row) for n, row in enumerate(rows)]),
      f"{side}_positions": join([[*range(len(row))] for row in rows]),
    }

  shifted = [[token + found.shift for token in row] for row in TARGETS]
  batch = {
    "decoder_target_tokens": join(shifted),
    "decoder_input_tokens": join([[0, *row[:-1]] for row in shifted]),
    **describe("decoder", TARGETS),
  }
  if not found.settings.is_decoder:
    batch |= {"encoder_input_tokens": join(INPUTS), **describe("encoder", INPUTS)}
  return {name: jnp.asarray(value) for name, value in batch.items()}


def logits(found: Any, batch: dict[str, jax.Array], **changes: Any) -> np.ndarray:
  """Returns this project's logits, by Transformers' ids."""
  module = found.model.module.clone(config=found.model.network_config.replace(**changes))

  def compute(params: Any) -> jax.Array:
    result: jax.Array = module.apply({"params": params}, enable_dropout=False, **batch)
    return result

  return np.asarray(jax.jit(compute)(found.params))[..., found.shift : found.shift + VOCAB]


def decode(
  found: Any, rows: list[list[int]], new_tokens: int, beams: int = 1, **controls: Any
) -> list[list[int]]:
  """Returns the tokens that this project generates for each row, by Transformers' ids."""
  model, shift = found.model, found.shift
  options = {"bad_words_ids": [] if shift else [[0]], **controls}  # Token 0 is padding here.
  options |= {"alpha": 0.0, "max_decode_step": new_tokens} if beams > 1 else {}
  model._decode_fn = beam_search if beams > 1 else temperature_sample
  if found.settings.is_decoder:
    prompts = [[0, *(token + shift for token in row)] for row in rows]
    width = max(map(len, prompts))
    ones = [[1] * len(row) for row in prompts]
    batch = {
      "decoder_input_tokens": pad(prompts, length=width + new_tokens - 1),
      "decoder_causal_attention": pad(ones, length=width),
    }
  else:
    targets = np.zeros((len(rows), new_tokens), int)
    batch = {"encoder_input_tokens": pad(rows), "decoder_input_tokens": targets}
  predict = jax.jit(
    lambda params, batch: model.predict_batch_with_aux(
      params, batch, num_decodes=beams, decoder_params=options
    )[0]
  )
  decodes = np.asarray(predict(found.params, {k: jnp.asarray(x) for k, x in batch.items()}))
  tokens: list[list[int]] = (decodes[:, :new_tokens] - shift).tolist()
  return tokens


def start_of(path: Any) -> int:
  """Returns Transformers' token that starts texts."""
  config = json.loads((path / "config.json").read_text())
  config = config.get("decoder", config)
  starts = [
    config.get("decoder_start_token_id"),
    config.get("bos_token_id"),
    config.get("eos_token_id"),
    0,
  ]
  return next(start for start in starts if isinstance(start, int))


def their_arguments(found: Any, on_left: bool = False) -> dict[str, Any]:
  """Returns the arguments of Transformers' model for both examples."""
  import torch

  start = start_of(found.path)
  mask = torch.tensor(pad([[1] * len(row) for row in TARGETS], on_left))
  ids = torch.tensor(pad([[start, *row[:-1]] for row in TARGETS], on_left))
  if found.settings.is_decoder:
    return {"input_ids": ids, "attention_mask": mask}
  return {
    "input_ids": torch.tensor(pad(INPUTS, on_left)),
    "attention_mask": torch.tensor(pad([[1] * len(row) for row in INPUTS], on_left)),
    "decoder_input_ids": ids,
    "decoder_attention_mask": mask,
  }


def their_logits(found: Any, theirs: Any, on_left: bool = False) -> np.ndarray:
  """Returns Transformers' logits for both examples."""
  import torch

  with torch.no_grad():
    output = theirs(**their_arguments(found, on_left)).logits
  return np.asarray(output.numpy())
