"""Reads and writes the weights of Transformers' T5 family: T5, mT5, ByT5, UMT5, Flan-T5, LongT5, Switch.

In a Switch Transformer, feed-forward blocks are called `mlp`, and each expert has weights of its own.
"""

import math
import re
from typing import Any

from rosetta_t5.checkpoints.arrays import parameter_trees
from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray, scale, transpose
from rosetta_t5.checkpoints.arrays.parameter_trees import EMBEDDING, HEAD
from rosetta_t5.checkpoints.formats.hugging_face import long_t5, name_tables
from rosetta_t5.checkpoints.formats.hugging_face.name_tables import Arrays, Config, WeightMapping
from rosetta_t5.networks.config import T5Config

_SWITCH, _LONG = "switch_transformers", "longt5"
MODEL_TYPES = {
  "t5": "T5",
  "mt5": "MT5",
  "umt5": "UMT5",
  _LONG: "LongT5",
  _SWITCH: "SwitchTransformers",
}
IS_DECODER = False
FIXED = {"router_bias": False}
CLASS_DEFAULTS: dict[str, Config] = {}
DEFAULTS = {"dropout_rate": 0.1, "initializer_factor": 1.0, "pad_token_id": 0, "eos_token_id": 1}
_SIZES = {
  "vocab_size": "vocab_size",
  "d_model": "emb_dim",
  "d_kv": "head_dim",
  "d_ff": "mlp_dim",
  "num_heads": "num_heads",
  "num_layers": "num_encoder_layers",
  "num_decoder_layers": "num_decoder_layers",
  "relative_attention_num_buckets": "num_buckets",
}
# Mesh TensorFlow's T5 1.0 had such a bias, which Transformers ignores.
IGNORED = re.compile(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\..*")
_SHARED, _HEAD = "shared.weight", "lm_head.weight"
_OWN_TABLES = {side: f"{side}.embed_tokens.weight" for side in ("encoder", "decoder")}
_ATTENTIONS = {
  "encoder": {"0.{attention}": "attention"},
  "decoder": {"0.{attention}": "self_attention", "1.EncDecAttention": "encoder_decoder_attention"},
}
_MT5_VOCABULARY = 250112
_EXPERT_CAPACITY = 64  # the default of Transformers


def has(arrays: Arrays) -> bool:
  """Returns whether weights have an encoder without norms after its blocks."""
  names = [name for name in arrays if name.startswith("target/encoder/")]
  return bool(names) and not any("/post_attention_layer_norm/" in name for name in names)


def weight_table(config: Config) -> list[WeightMapping]:
  """Returns the table of every weight that a model may have.

  A relative bias that all layers share is stored in layer 0.
  """
  model_type = config["model_type"]
  mlp = "mlp" if model_type == _SWITCH else "DenseReluDense"
  table = [
    WeightMapping(_SHARED, (EMBEDDING,)),
    WeightMapping(_HEAD, (HEAD,), is_transposed=True, is_required=False),
  ]
  local = "SelfAttention"
  if model_type == _LONG:
    local = long_t5.attention_name(config)
    table += long_t5.block_table(config)
  for side, norms in parameter_trees.NORMS.items():
    attention = local if side == "encoder" else "SelfAttention"
    norm = (f"target/{side}/{side}_norm/scale",)
    table.append(WeightMapping(f"{side}.final_layer_norm.weight", norm, is_required=False))
    theirs, ours = f"{side}.block.{{n}}.layer", f"target/{side}/layers_{{n}}"
    last = f"{len(norms) - 1}.{mlp}"
    required = {f"{number}.layer_norm": f"{name}/scale" for number, name in enumerate(norms)}
    required |= {
      f"{their_block.format(attention=attention)}.{letter}": f"{our_block}/{name}/kernel"
      for their_block, our_block in _ATTENTIONS[side].items()
      for letter, name in parameter_trees.ATTENTION_MATRICES.items()
    }
    optional = {f"{last}.{name}": f"mlp/{name}/kernel" for name in ("wi", "wi_0", "wi_1")}
    optional[f"0.{attention}.relative_attention_bias"] = "relpos_bias/rel_embedding"
    (optional if model_type == _SWITCH else required)[f"{last}.wo"] = "mlp/wo/kernel"
    if model_type == _SWITCH:
      optional[f"{last}.router.classifier"] = "mlp/router/router_weights/w/kernel"
      for name in ("wi", "wo"):
        optional[f"{last}.experts.expert_{{e}}.{name}"] = f"mlp/expert/{name}/kernel"
    table += [
      WeightMapping(f"{theirs}.{name}.weight", (f"{ours}/{parameter}",), True, name in required)
      for name, parameter in (required | optional).items()
    ]
  return table


def read_arrays(weights: Arrays, config: Config) -> dict[str, StoredArray]:
  """Returns {T5X's name: array} of a model, in T5X's plain tree; the values are read later.

  A relative bias of one layer becomes its stack's (`encoder/relpos_bias`); where every layer has one
  (UMT5), they remain the layers'. The output layer is left out if it is the embedding table divided
  by √d_model, which is how T5 1.0 computes logits.

  Raises:
    ValueError: weights are missing, or belong to another architecture.
  """
  table = weight_table(config)
  arrays = name_tables.from_transformers(_share_table(weights), table, config["model_type"])
  arrays = parameter_trees.rename_shared_biases(arrays)
  return _with_head(arrays, config) if _count_layers(arrays)["decoder"] else arrays


def _count_layers(arrays: Arrays) -> dict[str, int]:
  return {side: name_tables.count_layers(arrays, f"target/{side}/layers_") for side in _ATTENTIONS}


def _share_table(weights: Arrays) -> dict[str, StoredArray]:
  """Returns the weights with one embedding table, the one that encoder and decoder read."""
  rest = {name: x for name, x in weights.items() if name not in (_SHARED, *_OWN_TABLES.values())}
  # A stack without a table of its own has the shared one or, in MADLAD-400, the other stack's.
  stored = [weights[name] for name in (_SHARED, *_OWN_TABLES.values()) if name in weights]
  if not stored:
    raise ValueError(f"the embedding table ({_SHARED}) is missing: the folder is incomplete")
  tables = [weights.get(name, stored[0]) for name in _OWN_TABLES.values()]
  if not name_tables.are_equal(*tables):
    raise ValueError(
      f"encoder and decoder must share the embedding table, but {' and '.join(_OWN_TABLES.values())} differ"
    )
  return {**rest, _SHARED: tables[0]}


def _with_head(arrays: dict[str, StoredArray], config: Config) -> dict[str, StoredArray]:
  """Returns the arrays, with an output layer if the model does not compute logits as T5 1.0 does."""
  embedding = arrays[EMBEDDING]
  head = arrays.pop(HEAD, None)
  if head is not None and name_tables.are_equal(transpose(head), embedding):
    head = None  # It is the embedding table: PyTorch's files contain tied weights twice.
  if head is None and config["model_type"] == _LONG:
    return arrays  # it is always tied, whether divided or not
  if not _divides_logits(config):
    arrays[HEAD] = transpose(embedding) if head is None else head
  elif head is not None:
    arrays[HEAD] = scale(head, 1 / math.sqrt(embedding.shape[1]))
  return arrays


def _divides_logits(config: Config) -> bool:
  """Returns whether the model divides the input of its output layer by √d_model.

  In Transformers 4, `tie_word_embeddings` decides. Transformers 5 always writes True there for T5, mT5 and
  UMT5: its mT5 never divides, its UMT5 always divided until 5.23, and otherwise `scale_decoder_outputs` decides.
  """
  tied = config.get("tie_word_embeddings")
  if config["model_type"] == "mt5":
    return tied is True and str(config.get("transformers_version")).startswith(("2.", "3.", "4."))
  return bool(config.get("scale_decoder_outputs", tied is not False))


def sizes(arrays: Arrays) -> dict[str, int]:
  """Returns the fields of T5Config that the shapes of arrays in T5X's plain tree show.

  Raises:
    ValueError: the model has no relative bias.
  """
  biases = [array for name, array in arrays.items() if name.endswith("rel_embedding")]
  if not biases:
    raise ValueError("the model must have a relative bias, as T5 has, got none")
  heads, buckets = biases[0].shape
  layers = _count_layers(arrays)
  _, heads_width = arrays["target/encoder/layers_0/attention/query/kernel"].shape
  return {
    "vocab_size": arrays[EMBEDDING].shape[0],
    "emb_dim": arrays[EMBEDDING].shape[1],
    "head_dim": heads_width // heads,
    # Layer 0 may have experts, whose number is then the first dimension.
    "mlp_dim": next(x.shape[-2] for name, x in arrays.items() if name.endswith("/wo/kernel")),
    "num_heads": heads,
    "num_encoder_layers": layers["encoder"],
    "num_decoder_layers": layers["decoder"],
    "num_buckets": buckets,
  }


def network_settings(config: Config, arrays: Arrays) -> dict[str, Any]:
  """Returns the fields of T5Config for a model.

  Args:
    config: its config.json; {} for T5X's settings.
    arrays: its arrays in the plain tree.

  Raises:
    ValueError: config.json names an activation that this project does not have.
  """
  padding = config.get("pad_token_id") or 0
  start = config.get("decoder_start_token_id")
  settings = {
    "max_distance": config.get("relative_attention_max_distance", 128),
    "norm_epsilon": config.get("layer_norm_epsilon", 1e-6),
    "scale_attn_logits": False,
    "mlp_activations": _read_activations(config, arrays),
    "logits_via_embedding": HEAD not in arrays,
    "decoder_start_token_id": padding if start is None else start,
  }
  if config.get("model_type") == _LONG:
    settings["encoder"] = long_t5.read_encoder(config)
    settings["divide_tied_logits"] = _divides_logits(config)
  if parameter_trees.has_own_biases(arrays):
    settings["bias_per_layer"] = True
  if layers := _expert_layers(arrays):
    settings |= {
      "num_experts": _count_experts(arrays),
      "expert_layer_offset": max(start for start, _ in layers.values()),
      "expert_layer_period": layers["encoder"][1],
      "decoder_expert_layer_period": layers["decoder"][1] if "decoder" in layers else None,
      "expert_capacity": config.get("expert_capacity", _EXPERT_CAPACITY),
      "route_padding": not config.get("router_ignore_padding_tokens"),
    }
  return {**sizes(arrays), **settings}


def _read_activations(config: Config, arrays: Arrays) -> tuple[str, ...]:
  is_gated = any(name.endswith("/mlp/wi_1/kernel") for name in arrays)
  entry = "dense_act_fn" if config.get("model_type") == _SWITCH else "feed_forward_proj"
  value = str(config.get(entry, "gated-gelu" if is_gated else "relu"))
  # Transformers' 'gated-gelu' is the approximation by tanh, and its 'gelu' is not.
  name = "gelu_new" if value == "gated-gelu" else value.removeprefix("gated-")
  activation = name_tables.our_activation(entry, name)
  return (activation, "linear") if is_gated else (activation,)


def _count_experts(arrays: Arrays) -> int:
  return next((x.shape[0] for name, x in arrays.items() if "/mlp/expert/" in name), 0)


def _expert_layers(arrays: Arrays) -> dict[str, tuple[int, int]]:
  """Returns {stack: (the first layer that has experts, the distance between two)}; {} without experts.

  Raises:
    ValueError: Transformers cannot have experts in these layers.
  """
  result: dict[str, tuple[int, int]] = {}
  for side, layers in _count_layers(arrays).items() if _count_experts(arrays) else ():
    found = [n for n in range(layers) if f"target/{side}/layers_{n}/mlp/expert/wi/kernel" in arrays]
    step = max(1, layers // max(1, len(found)))
    if found != list(range(1 % step, layers, step)):
      raise ValueError(
        f"Transformers has experts in the layers 1, 1 + n, … of a stack of m·n layers, but the {side}'s "
        f"{layers} layers have them in {found}"
      )
    if found:
      result[side] = (found[0], step)
  return result


def find_model_type(arrays: Arrays, network: T5Config, source: Config) -> str:
  """Returns the model_type: UMT5 has a bias in each layer, and the size of mT5's vocabulary is known.

  Args:
    arrays: the weights by T5X's names.
    network: its settings; LongT5's encoder has windows.
    source: the config.json that the model came with, which decides between T5 and mT5; or {}.
  """
  if _count_experts(arrays):
    return _SWITCH
  if parameter_trees.has_own_biases(arrays):
    return "umt5"
  if network is not None and network.of_side("encoder").window is not None:
    return _LONG
  default = "mt5" if arrays[EMBEDDING].shape[0] == _MT5_VOCABULARY else "t5"
  stated = source.get("model_type")
  return stated if stated in ("t5", "mt5") else default


def make_config(
  arrays: Arrays, network: T5Config, model_type: str, source: Config
) -> dict[str, Any]:
  """Returns the entries of config.json that are the family's, for weights in T5X's plain tree.

  Args:
    arrays: the weights by T5X's names, with 2-D kernels.
    network: the settings of the network.
    model_type: one of MODEL_TYPES.
    source: the config.json that the model came with; or {}.

  Raises:
    ValueError: Transformers has no name for the activations, or not the model's experts.
  """
  has_decoder = network.num_decoder_layers > 0
  # Transformers 5 before 5.24 divides the input of every UMT5's head, and saves no entry for it.
  version = str(source.get("transformers_version"))
  is_from_5 = version.startswith("5.") and "scale_decoder_outputs" not in source
  is_scaled = HEAD not in arrays or (model_type == "umt5" and is_from_5)
  is_scaled &= network.divide_tied_logits
  return {
    **{entry: getattr(network, field) for entry, field in _SIZES.items()},
    **({} if has_decoder else {"num_decoder_layers": network.num_encoder_layers}),
    "relative_attention_max_distance": network.max_distance,
    "layer_norm_epsilon": network.norm_epsilon,
    **_activation_entries(tuple(network.mlp_activations)),
    "decoder_start_token_id": network.decoder_start_token_id or 0,  # generate() needs a number
    "is_encoder_decoder": has_decoder,
    "use_cache": has_decoder,
    # Transformers 4 decides by the first entry whether logits are divided by √d_model, as in T5 1.0, and
    # Transformers 5 by the second one.
    "tie_word_embeddings": is_scaled,
    **({"scale_decoder_outputs": is_scaled} if model_type in ("t5", "umt5", _LONG) else {}),
    **(long_t5.write_encoder(network.of_side("encoder")) if model_type == _LONG else {}),
    **_expert_entries(arrays, network),
  }


def _activation_entries(activations: tuple[str, ...]) -> dict[str, Any]:
  """Returns the entries of config.json for flax's names, such as ('gelu', 'linear')."""
  first, *rest = activations
  if rest not in ([], ["linear"]):
    raise ValueError(f"mlp_activations must be one, or one and 'linear', got {activations}")
  name = name_tables.their_activation(first)
  gated = "gated-gelu" if name == "gelu_new" else f"gated-{name}"
  entries = {"feed_forward_proj": gated if rest else name, "dense_act_fn": name}
  return {**entries, "is_gated_act": bool(rest)}


def _expert_entries(arrays: Arrays, network: T5Config) -> dict[str, Any]:
  """Returns the entries of config.json that describe the experts."""
  if not (expert_layers := _expert_layers(arrays)):
    return {}
  layers = _count_layers(arrays)
  if network.router != "switch" or network.normalize_expert_weights:
    raise ValueError(
      "Transformers' Switch Transformer needs router = 'switch' and normalize_expert_weights = None, got "
      f"{network.router!r} and {network.normalize_expert_weights}"
    )
  return {
    **{f"{side}_sparse_step": step for side, (_, step) in expert_layers.items()},
    **{f"num_sparse_{side}_layers": layers[side] // x for side, (_, x) in expert_layers.items()},
    "num_experts": _count_experts(arrays),
    "expert_capacity": network.expert_capacity or _EXPERT_CAPACITY,
    "router_bias": False,
    "router_dtype": "float32",
    "router_ignore_padding_tokens": not network.route_padding,
  }


def make_weights(arrays: Arrays, config: Config) -> dict[str, StoredArray]:
  """Returns {Transformers' name: array} for weights in T5X's plain tree and their config.json.

  Raises:
    ValueError: Transformers' family lacks some of the parameters.
  """
  model_type = config["model_type"]
  # Transformers stores a bias that the layers share in layer 0.
  own = {
    n if "/layers_" in n else n.replace("/relpos_bias/", "/layers_0/relpos_bias/"): x
    for n, x in arrays.items()
  }
  theirs = name_tables.to_transformers(own, weight_table(config), MODEL_TYPES[model_type])
  sqrt_d_model = math.sqrt(arrays[EMBEDDING].shape[1])
  if config.get("scale_decoder_outputs") and _HEAD in theirs:
    theirs[_HEAD] = scale(theirs[_HEAD], sqrt_d_model)
  if model_type == "mt5" and _HEAD not in theirs and config["is_encoder_decoder"]:
    # Transformers' mT5 never divides, so tied logits need a head of their own.
    theirs[_HEAD] = scale(theirs[_SHARED], 1 / sqrt_d_model)
  return theirs
