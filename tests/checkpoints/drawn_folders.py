"""Folders of tiny models of today's families, with weights that are drawn by their names.

They have the settings of tests/networks/transformers_families.py, which records Transformers' logits.
"""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file
from test_families import T5GEMMA, config_of
from transformers_families import ENCODER_DECODERS, FAMILIES, RECORDED, VOCAB, draw
from transformers_families import T5GEMMA as T5GEMMA_STACK

from rosetta_t5.checkpoints.arrays.lazy_arrays import as_stored_array
from rosetta_t5.checkpoints.formats.hugging_face import folder
from rosetta_t5.networks.transformer import DecoderWrapper, Transformer

MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "gemma2": "gemma2", "gemma3": "gemma3_text"}
ENCODER = T5GEMMA_STACK | {"sliding_window": 4}
CONFIGS = {
  **{name: FAMILIES[name][1] | {"model_type": kind} for name, kind in MODEL_TYPES.items()},
  "t5gemma": {"model_type": "t5gemma", "encoder": ENCODER, "decoder": T5GEMMA_STACK},
}


def network_of(family):
  return T5GEMMA.config if family == "t5gemma" else config_of(family)


def write_folder(path, family, rename=str, network=None, **changes):
  """Writes a folder with the weights that the family's network, or another one, has."""
  entries, network = {} if network else CONFIGS[family], network or network_of(family)
  module = Transformer(network) if family == "t5gemma" else DecoderWrapper(network)
  ids = [jnp.ones((1, 2), jnp.int32)] * (3 if family == "t5gemma" else 2)
  shapes = flatten_dict(jax.eval_shape(module.init, jax.random.PRNGKey(0), *ids)["params"], sep="/")
  arrays = {
    f"target/{name}": as_stored_array(np.zeros(leaf.shape, np.float32))
    for name, leaf in shapes.items()
  }
  config, weights = folder.make_config_and_weights(arrays, network, {})
  path.mkdir(exist_ok=True)
  drawn = {rename(name): draw(name, array.shape) for name, array in weights.items()}
  save_file(drawn, path / "model.safetensors")
  entries = {name: x for name, x in ((entries or config) | changes).items() if x is not None}
  (path / "config.json").write_text(json.dumps(entries))
  return drawn


def write_encoder_decoder(path, family):
  """Writes a folder of T5Gemma 2 or LongT5, whose weights have the recorded shapes."""
  shapes = json.loads(RECORDED.read_text())["shapes of weights"][family]
  drawn = {name: draw(name, shape) for name, shape in shapes.items()}
  path.mkdir(exist_ok=True)
  save_file(drawn, path / "model.safetensors")
  entries = ENCODER_DECODERS[family][1] | {"model_type": family, "vocab_size": VOCAB}
  (path / "config.json").write_text(json.dumps(entries))
  return drawn
