"""gin/runs/adapt_decoder.gin gives an encoder-decoder the weights of a decoder."""

from __future__ import annotations

import re

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_folders import network_of, write_folder
from flax.traverse_util import flatten_dict
from golden_recipes import bound_model, resolve
from tiny_models import T5_1_1

from rosetta_t5.checkpoints.formats.hugging_face import folder
from rosetta_t5.checkpoints.restore import find_matching_arrays
from rosetta_t5.networks.config import T5Config
from rosetta_t5.networks.transformer import Transformer
from rosetta_t5.training import TrainState
from t5x import utils

# Family of the decoder → what its encoder-decoder has besides the decoder's own fields.
ADAPTED = {
  "gemma2": {"shared_embedding": False},
  "gemma3": {"merged_attention": True, "end_of_image_id": 7},
  "llama": {},
}


def adapted_arrays(family, path):
  """Returns (the decoder's arrays, those that an encoder-decoder restores from them, its shapes)."""
  write_folder(path, family)
  decoder = network_of(family)
  fields = {name: x for name, x in vars(decoder).items() if name != "num_layers"}
  layers = dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), decoder.num_layers)
  network = T5Config(**(fields | layers | ADAPTED[family]))
  ids = [jnp.ones((1, 2), jnp.int32)] * 3
  shapes = jax.eval_shape(Transformer(network).init, jax.random.PRNGKey(0), *ids)["params"]
  resolve("models/t5_1_1/base", "runs/adapt_decoder")
  cfg = gin.get_configurable(utils.RestoreCheckpointConfig)(path=str(path))
  gin.clear_config()
  one = jax.ShapeDtypeStruct((), jnp.int32)
  restored = find_matching_arrays(
    path,
    {"target": shapes, "state": {"step": one, "param_states": {"decoder": {"m": one}}}},
    transformations=cfg.state_transformation_fns,
    allow_missing=cfg.fallback_to_scratch,
    allow_unexpected=not cfg.strict,
  )
  values = {name.removeprefix("target/"): x.get() for name, x in restored.items()}
  stored = {n.removeprefix("target/"): x.get() for n, x in folder.read_arrays(path).items()}
  return stored, values, flatten_dict(shapes, sep="/")


@pytest.mark.slow
@pytest.mark.parametrize("family", ADAPTED)
def test_all_weights_come_from_the_decoder_but_what_it_cannot_have(family, tmp_path):
  decoder, values, shapes = adapted_arrays(family, tmp_path / "decoder")
  assert shapes.keys() - values.keys() <= {"token_embedder/end_of_image"}
  for name, value in values.items():
    if name.endswith("embedding"):
      source = "decoder/token_embedder/embedding"
    else:
      # Encoder and cross-attention have the decoder's self-attention and the norms around it.
      source = (
        name.replace("encoder_decoder_", "").replace("cross_", "").replace("encoder", "decoder")
      )
      source = re.sub(r"(?<!self_)attention", "self_attention", source)
    np.testing.assert_array_equal(value, decoder[source], err_msg=name)


@pytest.mark.slow
def test_cross_attention_alone_is_trained_and_the_rest_keeps_its_values():
  resolve("models/t5_1_1/base", "optimizers/cross_attention_only")
  optimizer = bound_model().optimizer_def
  ids = [jnp.ones((1, 2), jnp.int32)] * 3
  variables = Transformer(T5_1_1).init(jax.random.PRNGKey(0), *ids)
  state = TrainState.create(optimizer, variables)
  gradients = jax.tree.map(jnp.ones_like, state.params)
  after = state.apply_gradient(gradients, learning_rate=0.1).params
  gin.clear_config()
  old, new = (flatten_dict(params, sep="/") for params in (state.params, after))
  changed = {name for name in old if not np.array_equal(old[name], new[name])}
  assert changed == {n for n in old if "encoder_decoder_attention" in n or "cross_att" in n}
  assert len(changed) == 5 * T5_1_1.num_decoder_layers
