"""Reads and writes the text weights of Transformers' T5Gemma 2: an encoder and a decoder of Gemma 3's layers.

Both read one table of tokens. The decoder's self-attention also attends to the encoded inputs, so there is no
cross-attention. Weights for images are
skipped, except the embedding of the token that ends an image.
"""

import re
from typing import Any

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.formats.hugging_face import layer_settings, name_tables
from rosetta_t5.checkpoints.formats.hugging_face.families import t5gemma
from rosetta_t5.checkpoints.formats.hugging_face.name_tables import Arrays, Config, WeightMapping
from rosetta_t5.networks.config import T5Config

MODEL_TYPES = {"t5gemma2": "T5Gemma2"}
IS_DECODER = False
SHIFTS_IDS = False
EMBEDDING = "target/token_embedder/embedding"
_END_OF_IMAGE = "target/token_embedder/end_of_image"
_LAYERS = "gemma3_text"
_TYPES = {"encoder": "t5gemma2_text", "decoder": "t5gemma2_decoder"}
FIXED: Config = {}
DEFAULTS: Config = t5gemma.DEFAULTS
CLASS_DEFAULTS: dict[str, Config] = {"t5gemma2": {"tie_word_embeddings": True, **DEFAULTS}}
SIZES: dict[str, Any] = {"t5gemma2": {}}
# The decoder and the output layer use the encoder's table.
IGNORED = re.compile(r".*\.inv_freq|(model\.)?decoder\.embed_tokens\..*|lm_head\..*")
_ENCODER = "model.encoder."


def has(arrays: Arrays) -> bool:
  """Returns whether weights have an encoder with two norms around each block, and one table of tokens."""
  return EMBEDDING in arrays and "target/encoder/layers_0/post_attention_layer_norm/scale" in arrays


def weight_table(config: Config) -> list[WeightMapping]:
  """Returns the table of weights, by the names of the modules, which files shorten."""
  del config
  renamed = (row.theirs.replace(_ENCODER, f"{_ENCODER}text_model.") for row in _weight_table())
  return [row._replace(theirs=name) for row, name in zip(_weight_table(), renamed, strict=True)]


def _weight_table() -> list[WeightMapping]:
  table = [
    WeightMapping(f"{_ENCODER}embed_tokens.weight", (EMBEDDING,)),
    WeightMapping(f"{_ENCODER}embed_tokens.eoi_embedding", (_END_OF_IMAGE,)),
  ]
  for side in ("encoder", "decoder"):
    norms = t5gemma.layer_norms(side, crosses=False)
    table += layer_settings.layer_table(f"model.{side}", side, norms)
  return table


def sizes(arrays: Arrays) -> dict[str, int]:
  """Returns the fields of T5Config that the shapes of arrays in the plain tree show."""
  layers = {
    f"num_{side}_layers": name_tables.count_layers(arrays, f"target/{side}/layers_")
    for side in ("encoder", "decoder")
  }
  return {**layer_settings.stack_sizes(arrays, "decoder", EMBEDDING), **layers}


def network_settings(config: Config, arrays: Arrays) -> dict[str, Any]:
  """Returns the fields of T5Config for a config.json and its arrays.

  If config.json is {}, these are only the fields that follow from shapes.
  """
  found = sizes(arrays)
  if not config:
    return found
  stacks = {}
  for side in ("encoder", "decoder"):
    shown = layer_settings.stack_sizes(arrays, side, EMBEDDING)
    layers = found[f"num_{side}_layers"]
    read = layer_settings.read_layers(_stack_entries(config, side), shown["emb_dim"], layers)
    stacks[side] = shown | read
  encoder, decoder = stacks["encoder"], stacks["decoder"]
  if (window := encoder["window"]) is not None:
    # An encoder's window is centred on each token.
    encoder |= {"window": (window + 1) // 2, "window_ahead": window // 2 + 1}
  others = {name: x for name, x in encoder.items() if x != decoder.get(name)}
  return {
    **found,
    **decoder,
    "encoder": others or None,
    "merged_attention": True,
    "end_of_image_id": config.get("eoi_token_index", 256_000),
    "logits_via_embedding": True,
    "decoder_start_token_id": _stack_entries(config, "decoder")["bos_token_id"],
  }


def _stack_entries(config: Config, side: str) -> dict[str, Any]:
  """Returns the entries of one stack, with the defaults of its class."""
  entries = config.get(side) or {}
  if side == "encoder":
    entries = entries.get("text_config") or {}
  return {**layer_settings.CLASS_DEFAULTS[_LAYERS], **entries, "model_type": _LAYERS}


def read_arrays(weights: Arrays, config: Config) -> dict[str, StoredArray]:
  """Returns {our name: array} for {Transformers' name: array}; the values are read later."""
  renamed = {name.replace("encoder.text_model.", "encoder."): x for name, x in weights.items()}
  return name_tables.from_transformers(renamed, _weight_table(), "t5gemma2")


def find_model_type(arrays: Arrays, network: T5Config, source: Config) -> str:
  """Returns "t5gemma2".

  Raises:
    ValueError: Transformers' T5Gemma 2 does not have the network's settings.
  """
  wrong = [] if network.merged_attention else ["merged_attention"]
  for side in ("encoder", "decoder"):
    wrong += layer_settings.wrong_fields(network.of_side(side), _LAYERS)
  if wrong:
    raise ValueError(f"Transformers' t5gemma2 needs other values of {', '.join(wrong)}")
  return "t5gemma2"


def make_config(
  arrays: Arrays, network: T5Config, model_type: str, source: Config, is_shifted: bool
) -> dict[str, Any]:
  """Returns the entries of config.json that are the family's; see `families`."""
  stacks = {}
  for side, kind in _TYPES.items():
    theirs = source.get(side) or {}
    theirs = (theirs.get("text_config") or {}) if side == "encoder" else theirs
    kept = {k: x for k, x in (theirs or DEFAULTS).items() if k not in layer_settings.SUPERSEDED}
    written = layer_settings.write_layers(network, side, _LAYERS)
    stacks[side] = {**kept, **written, "vocab_size": network.vocab_size, "model_type": kind}
  if (cfg := network.of_side("encoder")).windows is not None:
    stacks["encoder"]["sliding_window"] = sum(cfg.windows) - 1
  stacks["decoder"]["bos_token_id"] = network.decoder_start_token_id
  images = source.get("encoder") or {"model_type": "t5gemma2_encoder"}
  end = {"eoi_token_index": network.end_of_image_id}
  return {
    "encoder": {**images, **end, "text_config": stacks["encoder"]},
    "decoder": stacks["decoder"],
    **end,
    "is_encoder_decoder": True,
    "tie_word_embeddings": True,
    "vocab_size": network.vocab_size,
  }


def make_weights(arrays: Arrays, config: Config) -> dict[str, StoredArray]:
  """Returns {Transformers' name: array} for weights in the plain tree."""
  return name_tables.to_transformers(arrays, _weight_table(), "t5gemma2")
