"""Reads and writes the weights of Transformers' T5Gemma: an encoder and a decoder of Gemma 2's layers.

The two may differ in every size. Padding is token 0, and the decoder starts with `bos_token_id`.
"""

import re
from typing import Any

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.arrays.parameter_trees import HEAD
from rosetta_t5.checkpoints.formats.hugging_face import layer_settings, name_tables
from rosetta_t5.checkpoints.formats.hugging_face.name_tables import Arrays, Config, WeightMapping
from rosetta_t5.networks.config import T5Config

MODEL_TYPES = {"t5gemma": "T5Gemma"}
IS_DECODER = False
SHIFTS_IDS = False
_TABLES = {side: f"target/{side}/token_embedder/embedding" for side in ("encoder", "decoder")}
EMBEDDING = _TABLES["encoder"]
_NORM = "target/encoder/layers_0/post_attention_layer_norm/scale"
_MODULE = "t5_gemma_module"
FIXED: Config = {}
_IDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
DEFAULTS: Config = {"dropout_rate": 0.0, **_IDS}
CLASS_DEFAULTS: dict[str, Config] = {"t5gemma": {"tie_word_embeddings": True, **DEFAULTS}}
SIZES: dict[str, Any] = {"t5gemma": {}}
IGNORED = re.compile(r".*\.inv_freq")
_BLOCKS = {"self_attn": "{attention}", "feedforward": "mlp"}


def has(arrays: Arrays) -> bool:
  """Returns whether weights have an encoder with two norms around each block."""
  return _TABLES["encoder"] in arrays and _NORM in arrays


def _sides(arrays: Arrays) -> list[str]:
  return [side for side, table in _TABLES.items() if table in arrays]


def weight_table(config: Config) -> list[WeightMapping]:
  """Returns the table of weights of an encoder-decoder, or of an encoder alone."""
  return _weight_table(list(_TABLES) if config.get("is_encoder_decoder", True) else ["encoder"])


def _weight_table(sides: list[str]) -> list[WeightMapping]:
  """Returns the table of weights. Transformers' names begin with `model.` unless the model is only an encoder."""
  table = []
  for side in sides:
    theirs = f"model.{side}" if len(sides) > 1 else side
    crosses = side == "decoder"
    table.append(WeightMapping(f"{theirs}.embed_tokens.weight", (_TABLES[side],)))
    norms = layer_norms(side, crosses)
    table += layer_settings.layer_table(theirs, side, norms, crosses)
  return [*table, WeightMapping("lm_head.out_proj.weight", (HEAD,), True, is_required=False)]


def layer_norms(side: str, crosses: bool) -> dict[str, str]:
  """Returns {Transformers' name: ours} of the norms around each block of a layer."""
  blocks = _BLOCKS | ({"cross_attn": "cross_attention"} if crosses else {})
  attention = "self_attention" if side == "decoder" else "attention"
  return {
    f"{when}_{theirs}_layernorm": f"{when}_{ours.format(attention=attention)}_layer_norm"
    for theirs, ours in blocks.items()
    for when in ("pre", "post")
  }


def sizes(arrays: Arrays) -> dict[str, int]:
  """Returns the fields of T5Config that the shapes of arrays in the plain tree show."""
  side = _sides(arrays)[-1]
  layers = {
    f"num_{side}_layers": name_tables.count_layers(arrays, f"target/{side}/layers_")
    for side in _TABLES
  }
  return {**layer_settings.stack_sizes(arrays, side, _TABLES[side]), **layers}


def network_settings(config: Config, arrays: Arrays) -> dict[str, Any]:
  """Returns the fields of T5Config for a config.json and its arrays.

  If config.json is {}, these are only the fields that follow from shapes.

  Raises:
    ValueError: our networks do not support a setting, or padding is not token 0.
  """
  found = sizes(arrays)
  if not config:
    return found
  layer_settings.check_entries({k: x for k, x in config.items() if k not in _TABLES})
  stacks: dict[str, dict[str, Any]] = {}
  for side in _sides(arrays):
    entries = _stack_entries(config, side)
    if entries["pad_token_id"] != 0:
      raise ValueError(f"{side}: pad_token_id must be 0, got {entries['pad_token_id']}")
    shown = layer_settings.stack_sizes(arrays, side, _TABLES[side])
    layers = found[f"num_{side}_layers"]
    stacks[side] = shown | layer_settings.read_layers(entries, shown["emb_dim"], layers)
  decoder, encoder = stacks.get("decoder", stacks["encoder"]), dict(stacks["encoder"])
  if encoder["window"] is not None:
    # Transformers has the distance to the farthest token here, and our window counts the token itself too.
    encoder["window"] += 1
  return {
    **found,
    **decoder,
    "encoder": {
      name: value
      for name, value in encoder.items()
      if value != decoder[name] and name not in ("logit_softcap", "max_length")
    }
    or None,
    "shared_embedding": False,
    "logits_via_embedding": HEAD not in arrays,
    "decoder_start_token_id": _stack_entries(config, "decoder")["bos_token_id"],
  }


def _stack_entries(config: Config, side: str) -> dict[str, Any]:
  """Returns the entries of one stack, with the defaults of its class."""
  defaults = layer_settings.CLASS_DEFAULTS[_MODULE]
  return {**defaults, **(config.get(side) or {}), "model_type": _MODULE}


def read_arrays(weights: Arrays, config: Config) -> dict[str, StoredArray]:
  """Returns {our name: array} for {Transformers' name: array}; the values are read later."""
  sides = [side for side in _TABLES if any(f"{side}.layers.0." in name for name in weights)]
  arrays = name_tables.from_transformers(weights, _weight_table(sides), config["model_type"])
  if "decoder" not in sides:
    return arrays
  return name_tables.without_tied_head(arrays, _TABLES["decoder"], HEAD, config)


def find_model_type(arrays: Arrays, network: T5Config, source: Config) -> str:
  """Returns "t5gemma".

  Raises:
    ValueError: Transformers' T5Gemma does not have the network's settings.
  """
  for side in _sides(arrays):
    if wrong := layer_settings.wrong_fields(network.of_side(side), _MODULE):
      raise ValueError(f"Transformers' t5gemma needs other values of {', '.join(wrong)} ({side})")
  return "t5gemma"


def make_config(
  arrays: Arrays, network: T5Config, model_type: str, source: Config, is_shifted: bool
) -> dict[str, Any]:
  """Returns the entries of config.json that are the family's; see `families`."""
  sides, stacks = _sides(arrays), {}
  for side in _TABLES:
    kept = {
      k: x for k, x in (source.get(side) or _IDS).items() if k not in layer_settings.SUPERSEDED
    }
    own = side if side in sides else "encoder"
    entries = layer_settings.write_layers(network, own, _MODULE)
    if own == "encoder" and "sliding_window" in entries:
      entries["sliding_window"] -= 1
    vocabulary = {"vocab_size": network.of_side(own).vocab_size, "model_type": _MODULE}
    stacks[side] = {**kept, **entries, **vocabulary}
  if network.decoder_start_token_id is not None:
    stacks["decoder"]["bos_token_id"] = network.decoder_start_token_id
  return {
    **stacks,
    "is_encoder_decoder": len(sides) > 1,
    "tie_word_embeddings": HEAD not in arrays,
    "vocab_size": network.vocab_size,
  }


def make_weights(arrays: Arrays, config: Config) -> dict[str, StoredArray]:
  """Returns {Transformers' name: array} for weights in the plain tree."""
  return name_tables.to_transformers(arrays, _weight_table(_sides(arrays)), config["model_type"])
