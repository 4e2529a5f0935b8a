"""Folders of tiny random models, with the logits that Transformers itself computes for them.

`fixtures/transformers.json.gz` has, for each version of Transformers and each case below, the config.json
that it saved, the names of the weights, and logits. Weights are drawn from their names, so that they
need not be stored. To record a version anew, run this file where it is installed:

    pip install torch==2.13.0 transformers==5.24.0 && python tests/checkpoints/transformers_folders.py
"""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import tempfile
import zlib

import numpy as np
from safetensors.numpy import load_file, save_file

RECORDINGS = pathlib.Path(__file__).parent / "fixtures/transformers.json.gz"
INPUTS = np.array([[9, 4, 17, 3, 26, 8, 8, 11, 30, 2, 5, 19, 23, 6, 14, 28, 7, 3, 21, 1]])
TARGETS = np.array([[0, 13, 5, 29, 4, 4, 17, 10, 22, 2, 31, 6]])

_T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 2, "num_layers": 2, "vocab_size": 32}
_GPT = {"vocab_size": 32, "bos_token_id": 31, "eos_token_id": 31}
_GPT2 = _GPT | {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 16}
_NEO = _GPT | {"hidden_size": 16, "num_heads": 4, "num_layers": 3, "max_position_embeddings": 16}
_NEO |= {"attention_types": [[["global", "local"], 1], [["global"], 1]], "window_size": 3}
_UNUSED_BIAS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
_MADLAD = {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}

# {name: (class in Transformers, entries of config.json, changes of the stored weights)}. A change is
# +NAME for a weight that is added, and OLD>NEW for one with another name.
CASES = {
  "t5": ("T5", {}, ()),
  "t5-tied": ("T5", {"tie_word_embeddings": True}, ()),
  "t5-untied": ("T5", {"tie_word_embeddings": False}, ("+lm_head.weight",)),
  "t5-unused-bias": ("T5", {}, (f"+{_UNUSED_BIAS}",)),
  "t5-gated-gelu": ("T5", {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 1}, ()),
  "t5-gated-silu": ("T5", {"feed_forward_proj": "gated-silu", "num_heads": 3}, ()),
  "t5-silu": ("T5", {"feed_forward_proj": "silu"}, ()),
  "t5-exact-gelu": ("T5", {"feed_forward_proj": "gelu"}, ()),
  "t5-buckets": (
    "T5",
    {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 10},
    (),
  ),
  "t5-epsilon": ("T5", {"layer_norm_epsilon": 0.1}, ()),
  "t5-start": ("T5", {"decoder_start_token_id": 21}, ()),
  "madlad": (
    "T5",
    {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu", **_MADLAD},
    ("+lm_head.weight", "shared.weight>decoder.embed_tokens.weight"),
  ),
  "mt5": ("MT5", {}, ("+lm_head.weight",)),
  "mt5-tied": ("MT5", {"tie_word_embeddings": True}, ()),
  "umt5": ("UMT5", {}, ()),
  "umt5-untied": ("UMT5", {"tie_word_embeddings": False}, ("+lm_head.weight",)),
  "switch": ("SwitchTransformers", {}, ()),
  "gpt2": ("GPT2", {}, ()),
  "gpt2-relu": ("GPT2", {"activation_function": "relu", "n_inner": 40}, ()),
  "gpt2-buffers": (
    "GPT2",
    {"layer_norm_epsilon": 0.1, "bos_token_id": 3},
    ("+transformer.h.0.attn.bias", "+transformer.h.1.attn.masked_bias", "+lm_head.weight"),
  ),
  "gpt_neo": ("GPTNeo", {}, ()),
}
# Transformers 4 does not know these, or cannot read such a folder (of an untied Switch, it draws the tables).
CASES_OF_5 = {
  "switch-untied": (
    "SwitchTransformers",
    {"tie_word_embeddings": False, "dense_act_fn": "silu", "decoder_start_token_id": 21},
    ("+lm_head.weight",),
  ),
  "t5-unscaled": ("T5", {"scale_decoder_outputs": False}, ()),
  "t5-unscaled-head": ("T5", {"scale_decoder_outputs": False}, ("+lm_head.weight",)),
  "t5-scaled-head": ("T5", {"scale_decoder_outputs": True}, ("+lm_head.weight",)),
  "t5-untied-without-head": ("T5", {"tie_word_embeddings": False}, ()),
  "mt5-without-head": ("MT5", {}, ()),
  "umt5-unscaled": ("UMT5", {"scale_decoder_outputs": False}, ()),
  "umt5-unscaled-head": ("UMT5", {"scale_decoder_outputs": False}, ("+lm_head.weight",)),
  "umt5-head": ("UMT5", {}, ("+lm_head.weight",)),
}
# The first version that obeys these entries.
_SINCE = {"umt5-unscaled": (5, 24), "umt5-unscaled-head": (5, 24)}
# The weights that are copies of others.
_COPIES = {
  "gpt2-buffers": {"lm_head.weight": "transformer.wte.weight"},
  "switch-untied": {f"{x}coder.embed_tokens.weight": "shared.weight" for x in ("en", "de")},
}


def draw(name, shape):
  """Returns the values of a weight, which depend on its name only."""
  values = np.random.default_rng(zlib.crc32(name.encode())).normal(0, 0.3, shape)
  scale = 3 if "relative_attention_bias" in name or "router" in name else 1
  return (scale * values + (len(shape) == 1 and name.endswith("weight"))).astype(np.float32)


def draw_all(shapes, case):
  """Returns {name: array} for {name: shape}."""
  copies = _COPIES.get(case.partition("/")[2], {})
  return {name: draw(copies.get(name, name), shape) for name, shape in shapes.items()}


def recordings():
  """Returns {version/case: {config, weights, logits}}."""
  if not RECORDINGS.exists():
    return {}
  content = json.loads(gzip.decompress(RECORDINGS.read_bytes()))
  return {
    name: {**case, "weights": content["weights"][case["weights"]]}
    for name, case in content["cases"].items()
  }


def write_folder(case, folder, recorded=None):
  """Writes the folder of a case as Transformers saved it; returns the logits of the last target."""
  recorded = (recorded or recordings())[case]
  os.makedirs(folder, exist_ok=True)
  save_file(draw_all(recorded["weights"], case), pathlib.Path(folder) / "model.safetensors")
  (pathlib.Path(folder) / "config.json").write_text(json.dumps(recorded["config"]))
  return np.array(recorded["logits"], np.float32)


def save_with_transformers(case, folder):
  """Saves a case's folder with the installed Transformers."""
  import transformers

  kind, entries, changes = (CASES | CASES_OF_5)[case.partition("/")[2]]
  config_class = getattr(transformers, f"{kind}Config")
  suffix = {"GPT2": "LMHeadModel", "GPTNeo": "ForCausalLM"}.get(kind, "ForConditionalGeneration")
  sizes = {"GPT2": _GPT2, "GPTNeo": _NEO}.get(kind, _T5)
  if kind == "SwitchTransformers":
    sizes = sizes | {"num_experts": 3, "expert_capacity": 4, "num_decoder_layers": 2}
    sizes |= {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 2}
  model = getattr(transformers, kind + suffix)(config_class(**sizes | entries))
  model.save_pretrained(folder)
  file = pathlib.Path(folder) / "model.safetensors"
  shapes = {name: list(value.shape) for name, value in load_file(file).items()}
  shapes = _change_weights(shapes, changes)
  save_file(draw_all(shapes, case), file, {"format": "pt"})
  return shapes


def _change_weights(shapes, changes):
  table = next(
    shapes[name] for name in ("shared.weight", "transformer.wte.weight") if name in shapes
  )
  for change in changes:
    old, arrow, new = change.partition(">")
    if arrow:
      shapes = {new if name == old else name: shape for name, shape in shapes.items()}
    else:
      shape = table if "lm_head" in change else [1, 1, 16, 16] if "attn.bias" in change else [32, 2]
      shapes = shapes | {change[1:]: shape}
  return shapes


def logits_of_transformers(folder, inputs=INPUTS, targets=TARGETS):
  """Returns the logits [1, T, V] that the installed Transformers computes for a folder."""
  import torch
  import transformers

  config = json.loads((pathlib.Path(folder) / "config.json").read_text())
  model = getattr(transformers, config["architectures"][0]).from_pretrained(folder).eval()
  tokens = {"input_ids": torch.tensor(inputs), "decoder_input_ids": torch.tensor(targets)}
  if not config.get("is_encoder_decoder"):
    tokens = {"input_ids": tokens["decoder_input_ids"]}
  with torch.no_grad():
    return model(**tokens).logits.numpy()


def generate_with_transformers(folder):
  """Returns the tokens after the start that the installed Transformers generates greedily."""
  import torch
  import transformers

  model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
  options = {"max_new_tokens": 8, "do_sample": False, "num_beams": 1}
  options["attention_mask"] = torch.ones(INPUTS.shape, dtype=torch.long)
  return model.generate(input_ids=torch.tensor(INPUTS), **options)[0, 1:].tolist()


def first_token(config):
  """Returns the token with which Transformers starts the decoder."""
  if config["model_type"] in ("gpt2", "gpt_neo"):
    return config["bos_token_id"]
  return config.get("decoder_start_token_id") or 0


def main():
  """Records all cases with the installed Transformers."""
  import transformers

  version = tuple(map(int, transformers.__version__.split(".")[:2]))
  found = {n: c for n, c in recordings().items() if not n.startswith(transformers.__version__)}
  for case in CASES | CASES_OF_5:
    if version < _SINCE.get(case, (5,) if case in CASES_OF_5 else ()):
      continue
    name = f"{transformers.__version__}/{case}"
    with tempfile.TemporaryDirectory() as folder:
      shapes = save_with_transformers(name, folder)
      config = json.loads((pathlib.Path(folder) / "config.json").read_text())
      targets = TARGETS.copy()
      targets[0, 0] = first_token(config)
      logits = logits_of_transformers(folder, targets=targets)[0, -1]
      generated = generate_with_transformers(folder) if "decoder_start_token_id" in config else []
    found[name] = {"config": config, "weights": shapes, "logits": logits.round(5).tolist()}
    found[name]["generated"] = generated
  keys = {json.dumps(case["weights"]): None for case in found.values()}
  tables = list(keys)
  cases = {n: {**c, "weights": tables.index(json.dumps(c["weights"]))} for n, c in found.items()}
  content = {
    "weights": [json.loads(table) for table in tables],
    "cases": dict(sorted(cases.items())),
  }
  RECORDINGS.write_bytes(gzip.compress(json.dumps(content).encode(), mtime=0))


if __name__ == "__main__":
  main()
