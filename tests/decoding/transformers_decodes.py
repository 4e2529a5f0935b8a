"""Tiny random models in Transformers' format, and the tokens that its `generate` decodes with them.

`python tests/decoding/transformers_decodes.py` writes transformers_decodes.json, in an environment with
numpy, safetensors, torch and transformers.
"""

from __future__ import annotations

import json
import pathlib
import tempfile
from typing import Any

import numpy as np

RECORDED = pathlib.Path(__file__).with_suffix(".json")
WIDTH, HEADS, VOCAB, NEW_TOKENS = 16, 2, 32, 14
CONFIGS = {
  "t5": {"model_type": "t5", "d_model": WIDTH, "d_kv": 8, "num_heads": HEADS, "d_ff": 24}
  | {"num_layers": 1, "num_decoder_layers": 1, "vocab_size": VOCAB, "feed_forward_proj": "relu"}
  | {"eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0},
  "gpt2": {"model_type": "gpt2", "n_embd": WIDTH, "n_head": HEADS, "n_layer": 1}
  | {"n_positions": 32, "vocab_size": VOCAB, "eos_token_id": VOCAB - 1, "bos_token_id": VOCAB - 1},
}
# Inputs of an encoder-decoder, and prompts of a decoder, whose start token is its last one.
INPUTS = {
  "t5": [[5, 9, 3, 17, 1], [22, 8, 1, 0, 0], [4, 4, 30, 12, 1]],
  "gpt2": [[31, 5, 9, 5, 9, 3], [31, 22], [31, 4, 4, 30]],
}
_LONG = {"min_new_tokens": NEW_TOKENS}
_WORDS = {"bad_words_ids": [[7], [2, 2, 2], [4, 22], [15, 21], [9, 12, 2], [24, 30], [17], [1]]}
_ALL = {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3} | _WORDS | _LONG
_SHORT = {"repetition_penalty": 1.2, "min_length": 6}
# Name → (model, settings); the tests that are not slow are those of the first cases of each model.
CASES: dict[str, tuple[str, dict[str, Any]]] = {}


def _add(kind: str, *settings: dict[str, Any], beams: tuple[int, ...] = (1, 3)) -> None:
  for number, values in enumerate(settings):
    for count in beams:
      CASES[f"{kind} {number} beams {count}"] = (kind.split()[0], values | {"num_beams": count})


_add("t5", {}, _ALL, {"no_repeat_ngram_size": 1} | _LONG, {"no_repeat_ngram_size": 2} | _LONG)
_add("t5 words", {"repetition_penalty": 0.8} | _WORDS | _LONG)
# Transformers' beams end by other rules than T5X's, so only greedy decodes are compared to their end.
_add("t5 ends", *({"repetition_penalty": 3.0, "min_length": n} for n in (0, 7, 8)), beams=(1,))
_add("t5 new", {"repetition_penalty": 3.0, "min_new_tokens": 7}, beams=(1,))
_add("gpt2", _LONG, _ALL, {"repetition_penalty": 2.5} | _LONG, {"no_repeat_ngram_size": 2} | _LONG)
_add("gpt2 words", _WORDS | _LONG)


def write_folder(folder: pathlib.Path, kind: str) -> None:
  """Writes config.json and model.safetensors of a random model."""
  from safetensors.numpy import save_file

  rng = np.random.default_rng(7)
  shapes = _t5_shapes() if kind == "t5" else _gpt2_shapes()
  weights = {name: rng.normal(0, 0.6, shape).astype(np.float32) for name, shape in shapes.items()}
  save_file(weights, folder / "model.safetensors", {"format": "pt"})
  (folder / "config.json").write_text(json.dumps(CONFIGS[kind]))


def _t5_shapes() -> dict[str, tuple[int, ...]]:
  shapes: dict[str, tuple[int, ...]] = {"shared.weight": (VOCAB, WIDTH)}
  for stack, blocks in (("encoder", ("SelfAttention",)), ("decoder", ("SelfAttention", "EncDec"))):
    layers = f"{stack}.block.0.layer"
    bias = f"{layers}.0.SelfAttention.relative_attention_bias.weight"
    shapes |= {bias: (32, HEADS), f"{stack}.final_layer_norm.weight": (WIDTH,)}
    for number, block in enumerate(blocks):
      name = block if block == "SelfAttention" else "EncDecAttention"
      shapes |= {f"{layers}.{number}.{name}.{p}.weight": (WIDTH, WIDTH) for p in "qkvo"}
    dense = f"{layers}.{len(blocks)}.DenseReluDense"
    shapes |= {f"{dense}.wi.weight": (24, WIDTH), f"{dense}.wo.weight": (WIDTH, 24)}
    norms = range(len(blocks) + 1)
    shapes |= {f"{layers}.{number}.layer_norm.weight": (WIDTH,) for number in norms}
  return shapes


def _gpt2_shapes() -> dict[str, tuple[int, ...]]:
  layer = "transformer.h.0"
  sizes = {"attn.c_attn": (WIDTH, 3 * WIDTH), "attn.c_proj": (WIDTH, WIDTH)}
  sizes |= {"mlp.c_fc": (WIDTH, 4 * WIDTH), "mlp.c_proj": (4 * WIDTH, WIDTH)}
  shapes: dict[str, tuple[int, ...]] = {
    "transformer.wte.weight": (VOCAB, WIDTH),
    "transformer.wpe.weight": (32, WIDTH),
  }
  for name, shape in sizes.items():
    shapes |= {f"{layer}.{name}.weight": shape, f"{layer}.{name}.bias": shape[1:]}
  for norm in (f"{layer}.ln_1", f"{layer}.ln_2", "transformer.ln_f"):
    shapes |= {f"{norm}.{leaf}": (WIDTH,) for leaf in ("weight", "bias")}
  return shapes


def generate(folder: pathlib.Path, kind: str, settings: dict[str, Any]) -> list[list[int]]:
  """Returns the new tokens that Transformers generates for each input, until the end token."""
  import torch
  import transformers

  family = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
  model = family.from_pretrained(folder)
  model.generation_config.pad_token_id = 0
  found = []
  for tokens in INPUTS[kind]:
    ids = torch.tensor([[token for token in tokens if token or kind == "gpt2"]])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS}
    decoded = model.generate(ids, **options, **settings, do_sample=False, length_penalty=0.0)
    found.append(decoded[0, 1 if kind == "t5" else len(tokens) :].tolist())
  return found


def main() -> None:
  """Records the tokens of all cases."""
  recorded = {}
  for name, (kind, settings) in CASES.items():
    with tempfile.TemporaryDirectory() as folder:
      write_folder(pathlib.Path(folder), kind)
      recorded[name] = generate(pathlib.Path(folder), kind, settings)
  lines = (f"{json.dumps(name)}: {json.dumps(tokens)}" for name, tokens in recorded.items())
  RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
  main()
