"""NVIDIA's `te_helper`: the configuration of FP8."""

from rosetta_t5.networks.precision import TransformerEngineConfig
