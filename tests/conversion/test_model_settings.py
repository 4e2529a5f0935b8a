"""The settings of a model that its weights do not show are read from the config beside them."""

from __future__ import annotations

import pathlib

import pytest

from rosetta_t5.checkpoints.checkpoint_folders import read_arrays
from rosetta_t5.conversion.model_settings import read_model_settings

GATED = read_arrays(pathlib.Path(__file__).parents[1] / "checkpoints/fixtures/t5_1_1")


@pytest.mark.parametrize(
  "binding",
  [
    "network.T5Config.mlp_activations = ('silu', 'linear')",
    "network.T5Config.mlp_activations = \\\n    ('silu', 'linear')  # a comment",
    "decoder/t5.T5Config.mlp_activations = [\n  'silu',\n  'linear',\n]",
  ],
)
def test_activations_are_read_from_the_config_of_the_run(tmp_path, binding):
  (tmp_path / "config.gin").write_text(f"T5Config.emb_dim = %WIDTH\n{binding}\nWIDTH = 8\n")
  settings = read_model_settings(tmp_path / "checkpoint_1", GATED)
  assert settings.network.mlp_activations == ("silu", "linear")


def test_activations_are_derived_from_the_weights_where_the_config_has_none(tmp_path):
  assert read_model_settings(tmp_path / "checkpoint_1", GATED).network.mlp_activations == (
    "gelu",
    "linear",
  )
  (tmp_path / "config.gin").write_text("network.T5Config.mlp_activations = %ACTIVATIONS\n")
  assert read_model_settings(tmp_path / "checkpoint_1", GATED).network.mlp_activations == (
    "gelu",
    "linear",
  )
