"""NVIDIA's `te_helper`."""

from rosetta_t5.networks.precision import (
  TransformerEngineConfig,
)
