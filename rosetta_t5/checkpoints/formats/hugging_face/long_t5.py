"""The attention of LongT5's encoder: its entries of config.json and its weights."""

from typing import Any

from rosetta_t5.argument_types import check_one_of
from rosetta_t5.checkpoints.formats.hugging_face.name_tables import Config, WeightMapping
from rosetta_t5.networks.config import NetworkConfig

LOCAL, BLOCKS = "local", "transient-global"
# Transformers' names of the attention.
_NAMES = {LOCAL: "LocalSelfAttention", BLOCKS: "TransientGlobalSelfAttention"}
_DEFAULTS = {"encoder_attention_type": LOCAL, "local_radius": 127, "global_block_size": 16}


def attention_name(config: Config) -> str:
  """Returns Transformers' name of the encoder's attention."""
  return _NAMES[_type(config)]


def block_table(config: Config) -> list[WeightMapping]:
  """Returns the weights that transient-global attention adds to an encoder; [] for local attention."""
  if _type(config) == LOCAL:
    return []
  first = f"encoder.block.0.layer.0.{_NAMES[BLOCKS]}.global_relative_attention_bias.weight"
  norm = f"encoder.block.{{n}}.layer.0.{_NAMES[BLOCKS]}.global_input_layer_norm.weight"
  bias, scale = "global_relpos_bias/rel_embedding", "layers_{n}/global_input_layer_norm/scale"
  return [
    WeightMapping(first, (f"target/encoder/{bias}",), is_transposed=True),
    WeightMapping(norm, (f"target/encoder/{scale}",)),
  ]


def read_encoder(config: Config) -> dict[str, Any]:
  """Returns `T5Config.encoder` for a config.json.

  Raises:
    ValueError: the kind of attention is not known.
  """
  entries, kind = {**_DEFAULTS, **config}, _type(config)
  return {
    "layer_pattern": ("local",),
    "window": entries["local_radius"] + 1,
    "global_block_size": entries["global_block_size"] if kind == BLOCKS else None,
  }


def write_encoder(encoder: NetworkConfig) -> dict[str, Any]:
  """Returns the entries of config.json for an encoder with windows."""
  # `find_model_type` returns LongT5 only for encoders with windows.
  assert encoder.window is not None
  blocks = encoder.global_block_size
  return {
    "local_radius": encoder.window - 1,
    "encoder_attention_type": LOCAL if blocks is None else BLOCKS,
    **({} if blocks is None else {"global_block_size": blocks}),
  }


def _type(config: Config) -> str:
  kind = str(config.get("encoder_attention_type", LOCAL))
  check_one_of("encoder_attention_type", kind, _NAMES)
  return kind
