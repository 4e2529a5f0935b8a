"""What is assumed of a user's own network, whose config may lack the settings of `NetworkConfig`."""

from __future__ import annotations

from typing import Any

_ASSUMED: dict[str, Any] = {
  "attention_kernel": "xla",
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
  """Returns a setting of a network's config, or what is assumed where it lacks the setting or is None."""
  return getattr(config, name, _ASSUMED[name])
