"""Computes a checkpoint's logits with this project's networks, in float32."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.arrays.tree_layouts import to_plain_tree, to_scalable_tree
from rosetta_t5.conversion.model_facts import ModelFacts
from rosetta_t5.networks import scalable_t5, t5
from rosetta_t5.networks.decoder import DecoderWrapper

Arrays = Mapping[str, StoredArray]
# The encoder's inputs [1, S], and the decoder's inputs [1, T].
Tokens = tuple[np.ndarray, np.ndarray]


def network_outputs(arrays: Arrays, facts: ModelFacts, tokens: Tokens) -> np.ndarray:
  """Returns the logits [1, T, V] of a model, or the outputs [1, S, D] of an encoder without a decoder.

  Args:
    arrays: the model's arrays.
    facts: the network's settings.
    tokens: ids by this project's vocabulary, without padding except as the start of the decoder.
  """
  plain = to_plain_tree(arrays)
  settings: dict[str, Any] = {"dtype": jnp.float32, "attention_kernel": "xla"}
  if facts.is_gpt:
    settings["padding_never_follows"] = False  # Transformers computes a logit for each token.
  config: Any = dataclasses.replace(facts.network, **settings)
  module: Any = DecoderWrapper(config) if facts.is_gpt else t5.Transformer(config)
  if any(re.search(r"/layers_\d+/relpos_bias/", name) for name in plain):
    # UMT5: each layer has a bias, as in T5X's scalable T5.
    plain = to_scalable_tree(plain)
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    module = scalable_t5.Transformer(scalable_t5.T5Config(**fields))
  params = unflatten_dict(
    {
      tuple(name.removeprefix("target/").split("/")): jnp.asarray(array.get(), jnp.float32)
      for name, array in plain.items()
    }
  )
  inputs, targets = (jnp.asarray(ids, jnp.int32) for ids in tokens)
  real, options = jnp.ones_like(targets), {"enable_dropout": False}
  if facts.is_gpt:
    call = [targets, real]
  elif "decoder" in params:
    call = [inputs, targets, real]
  else:
    call, options["method"] = [inputs], module.encode
  with jax.default_matmul_precision("highest"):
    # Not jitted: a large model would take longer to compile than to compute once.
    return np.asarray(module.apply({"params": params}, *call, **options))
