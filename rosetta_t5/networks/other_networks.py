"""Defaults for the config of a user's own network, which may lack settings of `NetworkConfig`."""

from __future__ import annotations

from typing import Any

_DEFAULTS: dict[str, Any] = {
  "attention_kernel": "xla",
  "decoder_start_token_id": None,
  "dtype": "float32",
  "fuse_qkv_params": False,
  "matmul": None,
  "merged_attention": False,
  "num_experts": 0,
  "pad_id": 0,
  "positions": "relative",
  "remat_policy": "none",
  "scan_layers": False,
  "transpose_batch_sequence": False,
  "vocab_size": None,
}


def setting_of(config: Any, name: str) -> Any:
  """Returns a setting of a network's config; a default if the config does not have it, or is None."""
  return getattr(config, name, _DEFAULTS[name])
