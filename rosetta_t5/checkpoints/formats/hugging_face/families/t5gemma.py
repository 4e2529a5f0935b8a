"""Reads and writes the weights of Transformers' T5Gemma and, of T5Gemma 2, those for text.

T5Gemma's encoder and decoder have Gemma 2's layers, and may differ in every size. T5Gemma 2's have Gemma 3's layers
and read one table of tokens. Its decoder's self-attention also attends to the encoded inputs, so there is no
cross-attention. Weights for images are skipped, except the embedding of the token that ends an image. Padding is
token 0, and the decoder starts with `bos_token_id`.
"""

import re
from collections.abc import Sequence
from typing import Any

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.arrays.parameter_trees import EMBEDDING, HEAD
from rosetta_t5.checkpoints.formats.hugging_face import layer_settings, name_tables
from rosetta_t5.checkpoints.formats.hugging_face.name_tables import Arrays, Config, WeightMapping
from rosetta_t5.networks.config import T5Config

_SECOND = "t5gemma2"
MODEL_TYPES = {"t5gemma": "T5Gemma", _SECOND: "T5Gemma2"}
IS_DECODER = False
FIXED: Config = {}
_IDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
DEFAULTS: Config = {"dropout_rate": 0.0, **_IDS}
CLASS_DEFAULTS = {key: {"tie_word_embeddings": True, **DEFAULTS} for key in MODEL_TYPES}
IGNORED = re.compile(r".*\.inv_freq")
_SIDES = ("encoder", "decoder")
_OWN_TABLE = "target/{}/token_embedder/embedding"
_BLOCKS = {"self_attn": "{attention}", "feedforward": "mlp"}
# The model_type of the layers, whose entries `layer_settings` knows.
_LAYERS = {"t5gemma": "t5_gemma_module", _SECOND: "gemma3_text"}
_STACKS = {"encoder": "t5gemma2_text", "decoder": "t5gemma2_decoder"}
# T5Gemma 2's decoder and output layer use the encoder's table.
_TIED = re.compile(r"(model\.)?decoder\.embed_tokens\..*|lm_head\..*")


def has(arrays: Arrays) -> bool:
  """Returns whether weights have an encoder with two norms around each block."""
  return "target/encoder/layers_0/post_attention_layer_norm/scale" in arrays


def _table(arrays: Arrays, side: str) -> str:
  """Returns the name of a stack's table of tokens."""
  own = _OWN_TABLE.format(side)
  return own if own in arrays else EMBEDDING


def _sides(arrays: Arrays) -> list[str]:
  return [side for side in _SIDES if any(f"{side}/layers_0/" in name for name in arrays)]


def weight_table(config: Config) -> list[WeightMapping]:
  """Returns the table of weights, by the names of modules, which the files of T5Gemma 2 shorten."""
  sides = _SIDES if config.get("is_encoder_decoder", True) else _SIDES[:1]
  table = _weight_table(sides, config["model_type"])
  if config["model_type"] != _SECOND:
    return table
  encoder = "model.encoder."
  return [r._replace(theirs=r.theirs.replace(encoder, f"{encoder}text_model.")) for r in table]


def _weight_table(sides: Sequence[str], model_type: str) -> list[WeightMapping]:
  """Returns the table of weights. Transformers' names begin with `model.` unless the model is only an encoder."""
  is_second, table = model_type == _SECOND, []
  for side in sides:
    theirs = f"model.{side}" if len(sides) > 1 else side
    crosses = side == "decoder" and not is_second
    if not is_second or side == "encoder":
      ours = EMBEDDING if is_second else _OWN_TABLE.format(side)
      table.append(WeightMapping(f"{theirs}.embed_tokens.weight", (ours,)))
    table += layer_settings.layer_table(theirs, side, _norms(side, crosses), crosses)
  if is_second:
    end = "target/token_embedder/end_of_image"
    return [*table, WeightMapping("model.encoder.embed_tokens.eoi_embedding", (end,))]
  return [*table, WeightMapping("lm_head.out_proj.weight", (HEAD,), True, is_required=False)]


def _norms(side: str, crosses: bool) -> dict[str, str]:
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
    for side in _SIDES
  }
  return {**layer_settings.stack_sizes(arrays, side, _table(arrays, side)), **layers}


def network_settings(config: Config, arrays: Arrays) -> dict[str, Any]:
  """Returns the fields of T5Config for a config.json and its arrays.

  If config.json is {}, these are only the fields that follow from shapes.

  Raises:
    ValueError: our networks do not support a setting, or padding is not token 0.
  """
  found = sizes(arrays)
  if not config:
    return found
  is_second = config["model_type"] == _SECOND
  if not is_second:
    layer_settings.check_entries({k: x for k, x in config.items() if k not in _SIDES})
  stacks: dict[str, dict[str, Any]] = {}
  for side in _sides(arrays):
    entries = _stack_entries(config, side)
    if entries["pad_token_id"] != 0:
      raise ValueError(f"{side}: pad_token_id must be 0, got {entries['pad_token_id']}")
    shown = layer_settings.stack_sizes(arrays, side, _table(arrays, side))
    layers = found[f"num_{side}_layers"]
    stacks[side] = shown | layer_settings.read_layers(entries, shown["emb_dim"], layers)
  decoder, encoder = stacks.get("decoder", stacks["encoder"]), dict(stacks["encoder"])
  if (window := encoder["window"]) is not None:
    # T5Gemma has the distance to the farthest token here, and our window counts the token itself too. In
    # T5Gemma 2 the window is centred on the token.
    centred = {"window": (window + 1) // 2, "window_ahead": window // 2 + 1}
    encoder |= centred if is_second else {"window": window + 1}
  kept = encoder.keys() - {"logit_softcap", "max_length"}
  start = _stack_entries(config, "decoder")["bos_token_id"]
  others = {n: x for n, x in encoder.items() if n in kept and x != decoder.get(n)}
  own = {"shared_embedding": False, "logits_via_embedding": HEAD not in arrays}
  if is_second:
    end = config.get("eoi_token_index", 256_000)
    own = {"merged_attention": True, "end_of_image_id": end, "logits_via_embedding": True}
  return {**found, **decoder, "encoder": others or None, "decoder_start_token_id": start, **own}


def _own_entries(config: Config, side: str) -> dict[str, Any]:
  """Returns the entries that a config.json has of one stack."""
  entries = config.get(side) or {}
  is_nested = side == "encoder" and config.get("model_type") == _SECOND
  return (entries.get("text_config") or {}) if is_nested else entries


def _stack_entries(config: Config, side: str) -> dict[str, Any]:
  """Returns the entries of one stack, with the defaults of its class."""
  kind = _LAYERS[config["model_type"]]
  defaults = layer_settings.CLASS_DEFAULTS[kind]
  return {**defaults, **_own_entries(config, side), "model_type": kind}


def read_arrays(weights: Arrays, config: Config) -> dict[str, StoredArray]:
  """Returns {our name: array} for {Transformers' name: array}; the values are read later."""
  model_type = config["model_type"]
  if model_type == _SECOND:
    shortened = {n.replace("encoder.text_model.", "encoder."): x for n, x in weights.items()}
    weights = {name: x for name, x in shortened.items() if not _TIED.fullmatch(name)}
  sides = [side for side in _SIDES if any(f"{side}.layers.0." in name for name in weights)]
  arrays = name_tables.from_transformers(weights, _weight_table(sides, model_type), model_type)
  if model_type == _SECOND or "decoder" not in sides:
    return arrays
  return name_tables.without_tied_head(arrays, _table(arrays, "decoder"), HEAD, config)


def find_model_type(arrays: Arrays, network: T5Config, source: Config) -> str:
  """Returns the type of a model.

  Raises:
    ValueError: Transformers' models do not have the network's settings.
  """
  model_type = _SECOND if EMBEDDING in arrays else "t5gemma"
  merges = ["merged_attention"] * (network.merged_attention != (model_type == _SECOND))
  for side in _sides(arrays):
    if wrong := merges + layer_settings.wrong_fields(network, side, _LAYERS[model_type]):
      raise ValueError(
        f"Transformers' {model_type} needs other values of {', '.join(wrong)} ({side})"
      )
  return model_type


def make_config(
  arrays: Arrays, network: T5Config, model_type: str, source: Config
) -> dict[str, Any]:
  """Returns the entries of config.json that are the family's; see `families`."""
  sides, stacks, is_second = _sides(arrays), {}, model_type == _SECOND
  for side in _SIDES:
    theirs = _own_entries(source, side) or _IDS
    kept = {k: x for k, x in theirs.items() if k not in layer_settings.SUPERSEDED}
    own = side if side in sides else "encoder"
    cfg, kind = network.of_side(own), _LAYERS[model_type]
    entries = layer_settings.write_layers(network, own, kind)
    if own == "encoder" and cfg.windows is not None:
      entries["sliding_window"] = sum(cfg.windows) - 1 if is_second else cfg.windows[0] - 1
    named = {"vocab_size": cfg.vocab_size, "model_type": _STACKS[side] if is_second else kind}
    stacks[side] = {**kept, **entries, **named}
  if network.decoder_start_token_id is not None:
    stacks["decoder"]["bos_token_id"] = network.decoder_start_token_id
  top: dict[str, Any] = {}
  if is_second:
    images = source.get("encoder") or {"model_type": "t5gemma2_encoder"}
    top = {"eoi_token_index": network.end_of_image_id}
    stacks["encoder"] = {**images, **top, "text_config": stacks["encoder"]}
  return {
    **stacks,
    **top,
    "is_encoder_decoder": len(sides) > 1,
    "tie_word_embeddings": HEAD not in arrays,
    "vocab_size": network.vocab_size,
  }


def make_weights(arrays: Arrays, config: Config) -> dict[str, StoredArray]:
  """Returns {Transformers' name: array} for weights in the plain tree."""
  model_type = config["model_type"]
  table = _weight_table(_sides(arrays), model_type)
  return name_tables.to_transformers(arrays, table, model_type)
