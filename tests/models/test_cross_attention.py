"""What targets attend to: probabilities over the inputs' tokens, as Transformers computes them."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from tiny_models import T5_1_1, feature, make_batch, make_model, variables
from transformers_texts import write_folder

from rosetta_t5.networks.transformer import Transformer
from rosetta_t5.trained_model import open_model_dir

CONFIG = dataclasses.replace(T5_1_1, num_decoder_layers=3)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["xla", "flash"])
def test_each_target_divides_one_over_the_inputs_that_are_not_padding(kernel):
  module = Transformer(dataclasses.replace(CONFIG, attention_kernel=kernel))
  batch = make_batch(3)
  weights = make_model(module).cross_attention(variables(module)["params"], batch)
  is_target = np.asarray(batch["decoder_target_tokens"]) > 0
  assert weights.shape == (3, 3, *is_target.shape[1:], batch["encoder_input_tokens"].shape[1])
  of_targets = np.moveaxis(weights, 1, 2)[is_target]  # [targets, L, S]
  np.testing.assert_allclose(of_targets.sum(-1), 1, rtol=1e-5)
  is_padding = np.asarray(batch["encoder_input_tokens"]) == 0
  assert np.all(np.moveaxis(weights, 3, 1)[is_padding][:, :, 0] == 0)
  assert np.ptp(of_targets) > 0.1


@pytest.mark.slow
def test_scanned_layers_have_the_weights_of_separate_ones_in_their_order():
  separate, scanned = (
    Transformer(dataclasses.replace(CONFIG, scan_layers=scan)) for scan in (False, True)
  )
  params, batch = variables(separate)["params"], make_batch(2)
  stacked = {**params, "decoder": {**params["decoder"]}}
  layers = [stacked["decoder"].pop(f"layers_{n}") for n in range(3)]
  axis = CONFIG.param_scan_axis
  stacked["decoder"]["decoder"] = jax.tree.map(lambda *x: np.stack(x, axis), *layers)
  encoder = dict(stacked["encoder"])
  encoder["encoder"] = jax.tree.map(lambda x: np.expand_dims(x, axis), encoder.pop("layers_0"))
  stacked["encoder"] = encoder
  weights = make_model(separate).cross_attention(params, batch)
  assert np.abs(weights[:, 0] - weights[:, 2]).max() > 1e-3
  of_scan = make_model(scanned).cross_attention(stacked, batch)
  np.testing.assert_allclose(of_scan, weights, rtol=1e-5, atol=1e-6)


def test_they_are_the_means_of_transformers_cross_attentions(tmp_path):
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  write_folder("5.24.0/t5", tmp_path)
  theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
  theirs.set_attn_implementation("eager")
  opened = open_model_dir(tmp_path)
  inputs, targets = np.array([[5, 9, 30, 1, 0, 0], [7, 8, 9, 10, 11, 1]]), np.array([[4, 6, 1]] * 2)
  batch = feature(inputs, targets)
  weights = opened.model.cross_attention(opened.state.params, batch)
  shifted = torch.tensor(np.asarray(batch["decoder_input_tokens"]))
  options = {"attention_mask": torch.tensor(inputs > 0), "output_attentions": True}
  outputs = theirs(torch.tensor(inputs), decoder_input_ids=shifted, **options)
  expected = torch.stack(outputs.cross_attentions, 1).mean(2).detach().numpy()
  np.testing.assert_allclose(weights, expected, atol=1e-5)
