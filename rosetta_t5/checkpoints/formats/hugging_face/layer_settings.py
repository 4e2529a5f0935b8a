"""The entries of config.json that describe the layers of Llama, Qwen, Gemma and Cohere, and their weights.

Transformers 4 and 5 name some of these entries differently (`rope_scaling` and `rope_parameters`,
`sliding_window_pattern` and `layer_types`). Both are read, and those of Transformers 5 are written.
"""

import math
import re
from typing import Any

from rosetta_t5.argument_types import check_one_of
from rosetta_t5.checkpoints.formats.hugging_face import name_tables
from rosetta_t5.checkpoints.formats.hugging_face.name_tables import Arrays, Config, WeightMapping
from rosetta_t5.networks.config import NetworkConfig

# The values of entries that a folder's config.json leaves out, by model_type; Transformers' class defaults.
_LLAMA: dict[str, Any] = {
  "vocab_size": 32000,
  "num_attention_heads": 32,
  "hidden_act": "silu",
  "max_position_embeddings": 2048,
  "rms_norm_eps": 1e-6,
  "attention_dropout": 0.0,
  "tie_word_embeddings": False,
  "rope_theta": 10_000.0,
}
_QWEN: dict[str, Any] = _LLAMA | {
  "vocab_size": 151_936,
  "num_key_value_heads": 32,
  "max_position_embeddings": 32768,
  "sliding_window": 4096,
  "max_window_layers": 28,
}
_GEMMA: dict[str, Any] = {
  "vocab_size": 256_000,
  "num_attention_heads": 8,
  "num_key_value_heads": 4,
  "head_dim": 256,
  "hidden_activation": "gelu_pytorch_tanh",
  "rms_norm_eps": 1e-6,
  "attention_dropout": 0.0,
  "query_pre_attn_scalar": 256,
  "sliding_window": 4096,
  "sliding_window_pattern": 2,
  "tie_word_embeddings": True,
  "pad_token_id": 0,
  "eos_token_id": 1,
  "bos_token_id": 2,
}
_GEMMA_2: dict[str, Any] = _GEMMA | {
  "attn_logit_softcapping": 50.0,
  "final_logit_softcapping": 30.0,
  "max_position_embeddings": 8192,
  "rope_theta": 10_000.0,
}
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
  "llama": _LLAMA | {"bos_token_id": 1, "eos_token_id": 2},
  "qwen2": _QWEN,
  "qwen3": _QWEN | {"head_dim": 128},
  "gemma2": _GEMMA_2,
  "gemma3_text": _GEMMA
  | {
    "vocab_size": 262_208,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
  },
  "t5_gemma_module": _GEMMA_2,
  "cohere": _LLAMA
  | {
    "vocab_size": 256_000,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 5,
    "eos_token_id": 255_001,
  },
}
# Entries of Transformers 4, which Transformers 5 replaced; they are read but not written.
SUPERSEDED = (
  *("rope_scaling", "rope_theta", "rope_local_base_freq", "sliding_window_pattern"),
  *("use_sliding_window", "hidden_act", "hidden_activation"),
)
_READ = {
  *(name for entries in CLASS_DEFAULTS.values() for name in entries),
  *SUPERSEDED,
  *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers"),
  *("rope_parameters", "layer_types", "attention_bias", "mlp_bias", "dropout_rate"),
  name_tables.PADDING_IS_TOKEN_0,
}
# Entries that do not change the logits.
_HARMLESS = re.compile(
  r"_.*|.*_token_id|architectures|(torch_)?dtype|transformers_version|use_cache|initializer_\w+|"
  r"(attention|classifier)_dropout\w*|id2label|label2id|problem_type|cache_implementation|"
  r"pretraining_tp|output_\w+|return_dict\w*|tokenizer_class|task_specific_params|unsloth_\w+|"
  r"is_(encoder_decoder|decoder|llama_config)|transformers\.js_config|cross_attention_hidden_size|"
  r"do_sample|temperature|top_[kp]|max_length|"
  r"(max|min)_new_tokens|num_beams|repetition_penalty|length_penalty|suppress_tokens"
)
_ROPE_ENTRIES = {
  "default": (),
  "linear": ("factor",),
  "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_MATRICES = {
  "self_attn.q_proj": "{attention}/query",
  "self_attn.k_proj": "{attention}/key",
  "self_attn.v_proj": "{attention}/value",
  "self_attn.o_proj": "{attention}/out",
  "mlp.gate_proj": "mlp/wi_0",
  "mlp.up_proj": "mlp/wi_1",
  "mlp.down_proj": "mlp/wo",
}
# Fields that may differ where a network computes the same; `_query_factor` has what the last two mean.
_EQUIVALENT = ("num_kv_heads", "layer_pattern", "scale_queries", "query_scale")


def check_entries(config: Config) -> None:
  """Raises ValueError if a config.json has entries whose effect on the model is unknown."""
  for name, value in config.items():
    if value and name not in _READ and not _HARMLESS.fullmatch(name):
      raise ValueError(
        f"{name} = {value!r} is not supported for {config['model_type']}: it may change what the model computes"
      )


def layer_table(
  theirs: str, side: str, norms: Config, crosses: bool = False
) -> list[WeightMapping]:
  """Returns the weights of a stack's layers and its last norm.

  Args:
    theirs: Transformers' prefix of the stack's weights, such as "model".
    side: our name of the stack, "encoder" or "decoder".
    norms: {Transformers' name: ours} of a layer's norms, without the prefixes and ".weight" or "/scale".
    crosses: whether the layers attend to encoded inputs.
  """
  attention = "attention" if side == "encoder" else "self_attention"
  layer, ours = f"{theirs}.layers.{{n}}", f"target/{side}/layers_{{n}}"
  matrices = {name: value.format(attention=attention) for name, value in _MATRICES.items()}
  if crosses:
    matrices |= {
      name.replace("self_attn", "cross_attn"): value.replace(attention, "encoder_decoder_attention")
      for name, value in matrices.items()
      if name.startswith("self_attn")
    }
  head_norms = {f"self_attn.{x[0]}_norm": f"{attention}/{x}_norm" for x in ("query", "key")}
  table = [WeightMapping(f"{theirs}.norm.weight", (f"target/{side}/{side}_norm/scale",))]
  for name, value in matrices.items():
    kernel, bias = (f"{ours}/{value}/kernel",), (f"{ours}/{value}/bias",)
    table.append(WeightMapping(f"{layer}.{name}.weight", kernel, is_transposed=True))
    table.append(WeightMapping(f"{layer}.{name}.bias", bias, is_required=False))
  for name, value in {**norms, **head_norms}.items():
    scale = (f"{ours}/{value}/scale",)
    table.append(WeightMapping(f"{layer}.{name}.weight", scale, is_required=name in norms))
  return table


def stack_sizes(arrays: Arrays, side: str, embedding: str) -> dict[str, int]:
  """Returns the fields of a network's config that follow from the shapes of a stack's arrays."""
  rows, width = arrays[embedding].shape
  return {
    "vocab_size": rows,
    "emb_dim": width,
    "mlp_dim": arrays[f"target/{side}/layers_0/mlp/wi_0/kernel"].shape[1],
  }


def read_layers(config: Config, width: int, layers: int) -> dict[str, Any]:
  """Returns the fields of `NetworkConfig` for the layers of a stack.

  Args:
    config: the stack's entries of config.json, with the defaults of their class.
    width: the size of the stack's embeddings.
    layers: the number of layers.

  Raises:
    ValueError: an entry has a value that our networks do not support.
  """
  check_entries(config)
  heads = config["num_attention_heads"]
  head_dim = config.get("head_dim") or width // heads
  is_gemma = "query_pre_attn_scalar" in config
  # Transformers ignores the soft limit of attention in Gemma 3.
  is_gemma_3, is_cohere = (config["model_type"] == x for x in ("gemma3_text", "cohere"))
  entry = "hidden_activation" if is_gemma else "hidden_act"
  return {
    "positions": "rotary",
    "num_heads": heads,
    "num_kv_heads": config.get("num_key_value_heads") or heads,
    "head_dim": head_dim,
    "mlp_activations": (name_tables.our_activation(entry, config[entry]), "linear"),
    "norm": "rms_plus_one" if is_gemma else "layer_without_bias" if is_cohere else "rms",
    "norm_epsilon": config["layer_norm_eps" if is_cohere else "rms_norm_eps"],
    "post_norms": is_gemma,
    "parallel_blocks": is_cohere,
    "rope_interleaved": is_cohere,
    "logit_scale": config.get("logit_scale", 1.0),
    "use_bias": False,
    "num_experts": 0,
    "scale_queries": not is_gemma,
    "query_scale": config["query_pre_attn_scalar"] ** -0.5 if is_gemma else None,
    "embedding_scale": width**0.5 if is_gemma else 1.0,
    "attention_softcap": None if is_gemma_3 else config.get("attn_logit_softcapping"),
    "logit_softcap": config.get("final_logit_softcapping"),
    "qk_norm": config["model_type"] in ("qwen3", "gemma3_text"),
    "qkv_bias": config["model_type"] == "qwen2",
    "attention_bias": bool(config.get("attention_bias")),
    "mlp_bias": bool(config.get("mlp_bias")),
    "divide_tied_logits": False,
    "max_length": config["max_position_embeddings"],
    **_read_windows(config, layers),
    **_read_ropes(config),
  }


def _read_windows(config: Config, layers: int) -> dict[str, Any]:
  """Returns the window of the local layers, and which layers are local."""
  types = config.get("layer_types")
  if types is None and "max_window_layers" in config:  # Qwen
    first = config["max_window_layers"] if config.get("use_sliding_window") else layers
    types = ["full_attention"] * first + ["sliding_attention"] * (layers - first)
  elif types is None:
    period = config.get("sliding_window_pattern", 1)
    types = [f"{'sliding' if (n + 1) % period else 'full'}_attention" for n in range(layers)]
  for name in types:
    check_one_of("layer_types", name, ("full_attention", "sliding_attention"))
  kinds = ["local" if name == "sliding_attention" else "global" for name in types[:layers]]
  if "local" not in kinds:
    return {"window": None, "layer_pattern": ("global",)}
  return {
    "window": config["sliding_window"],
    "layer_pattern": name_tables.layer_pattern(kinds, layers, "layer_types"),
  }


def _read_ropes(config: Config) -> dict[str, Any]:
  """Returns the frequencies of rotary positions."""
  parameters = config.get("rope_parameters") or {}
  scaling = config.get("rope_scaling") or {}
  if config["model_type"] != "gemma3_text":
    theta, found = read_rope(scaling or parameters, config)
    return {"rope_theta": theta, "rope_scaling": found, "local_rope_theta": None}
  theta, found = read_rope({**(parameters.get("full_attention") or {}), **scaling}, config)
  local = parameters.get("sliding_attention") or {}
  defaults = {**config, "rope_theta": config["rope_local_base_freq"]}
  local_theta, local_scaling = read_rope(local, defaults)
  if local_scaling:
    raise ValueError(f"the rope_type of sliding_attention must be 'default', got {dict(local)}")
  return {"rope_theta": theta, "rope_scaling": found, "local_rope_theta": local_theta}


def read_rope(entries: Config, config: Config) -> tuple[float, dict[str, Any] | None]:
  """Returns the base of the frequencies, and `NetworkConfig.rope_scaling`.

  Args:
    entries: the content of `rope_parameters` or `rope_scaling`.
    config: the content of config.json.

  Raises:
    ValueError: the kind of scaling, or an entry, is not known.
  """
  rest = dict(entries)
  theta = rest.pop("rope_theta", None) or config.get("rope_theta", 10_000.0)
  kind = rest.pop("rope_type", None) or rest.get("type") or "default"
  rest.pop("type", None)
  check_one_of("rope_parameters' rope_type", kind, _ROPE_ENTRIES)
  if kind == "llama3":
    rest.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
  if rest.get("partial_rotary_factor") == 1:
    del rest["partial_rotary_factor"]
  if rest.keys() != {*_ROPE_ENTRIES[kind]}:
    raise ValueError(
      f"rope_parameters of rope_type {kind!r} must have the entries {', '.join(_ROPE_ENTRIES[kind])} "
      f"besides rope_theta, got {dict(entries)}"
    )
  return theta, {"rope_type": kind, **rest} if kind != "default" else None


def write_layers(network: NetworkConfig, side: str, model_type: str) -> dict[str, Any]:
  """Returns the entries of config.json for the layers of a stack."""
  cfg, layers = network.of_side(side), network.layers_of(side)
  activation = name_tables.their_activation(cfg.mlp_activations[0])
  # Gemma has another name for the same function.
  activation = activation.replace("gelu_new", "gelu_pytorch_tanh")
  kinds = [cfg.layer_pattern[n % len(cfg.layer_pattern)] for n in range(layers)]
  types = [f"{'sliding' if kind == 'local' else 'full'}_attention" for kind in kinds]
  full = {"rope_type": "default", **(cfg.rope_scaling or {}), "rope_theta": cfg.rope_theta}
  local = {"rope_type": "default", "rope_theta": cfg.local_rope_theta}
  ropes = {"full_attention": full, "sliding_attention": local}
  entries: dict[str, Any] = {
    "hidden_size": cfg.emb_dim,
    "intermediate_size": cfg.mlp_dim,
    "num_hidden_layers": layers,
    "num_attention_heads": cfg.num_heads,
    "num_key_value_heads": cfg.kv_heads,
    "head_dim": cfg.head_dim,
    "layer_norm_eps" if model_type == "cohere" else "rms_norm_eps": cfg.norm_epsilon,
    "max_position_embeddings": cfg.max_length,
    "rope_parameters": ropes if model_type == "gemma3_text" else full,
  }
  if model_type != "qwen2":
    entries["attention_bias"] = cfg.attention_bias
  if model_type == "cohere":
    return entries | {"hidden_act": activation, "logit_scale": cfg.logit_scale}
  if model_type == "llama":
    return entries | {"hidden_act": activation, "mlp_bias": cfg.mlp_bias}
  entries["layer_types"] = types
  if model_type.startswith("qwen"):
    window = {"sliding_window": cfg.window} if cfg.window else {}
    return entries | {"hidden_act": activation, "use_sliding_window": bool(window), **window}
  return entries | {
    "hidden_activation": activation,
    "query_pre_attn_scalar": round(_query_factor(cfg) ** -2),  # an integer
    **({} if model_type == "gemma3_text" else {"attn_logit_softcapping": cfg.attention_softcap}),
    "final_logit_softcapping": cfg.logit_softcap,
    **({"sliding_window": cfg.window} if cfg.window else {}),
  }


def _query_factor(config: NetworkConfig) -> float:
  """Returns what queries are multiplied by."""
  is_scaled = config.scale_queries or config.scale_attn_logits
  return config.query_scale or (config.head_dim**-0.5 if is_scaled else 1.0)


def wrong_fields(network: NetworkConfig, side: str, model_type: str) -> list[str]:
  """Returns the fields of a stack's config that are others after a model of this type is written and read."""
  cfg = network.of_side(side)
  entries = {**CLASS_DEFAULTS[model_type], **write_layers(network, side, model_type)}
  read = read_layers({**entries, "model_type": model_type}, cfg.emb_dim, network.layers_of(side))
  different = [name for name, x in read.items() if not _are_equal(x, getattr(cfg, name))]
  wrong = [name for name in different if name not in _EQUIVALENT]
  factor = read["query_scale"] or cfg.head_dim**-0.5
  return wrong + ["query_scale"] * (not _are_equal(factor, _query_factor(cfg)))


def _are_equal(a: Any, b: Any) -> bool:
  if isinstance(a, float) and isinstance(b, float):
    return math.isclose(a, b, rel_tol=1e-6)
  return bool(tuple(a) == tuple(b) if isinstance(a, tuple) else a == b)
