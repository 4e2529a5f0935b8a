"""model-info.txt equals T5X's, byte for byte."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from rosetta_t5.checkpoints import TrainStateInitializer
from rosetta_t5.networks.transformer import T5Config, Transformer
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.telemetry.console import count_parameters, log_model_info, model_info
from rosetta_t5.training.optimizers.adafactor import Adafactor
from rosetta_t5.training.optimizers.factor_rules import standard_logical_factor_rules


@pytest.fixture(scope="module")
def reference():
  """The reference run's train state (shapes) and partitioner."""
  config = T5Config(
    vocab_size=384,
    emb_dim=64,
    num_heads=4,
    num_encoder_layers=2,
    num_decoder_layers=2,
    head_dim=16,
    mlp_dim=128,
    mlp_activations=("gelu", "linear"),
    dropout_rate=0.0,
  )
  optimizer = Adafactor(
    decay_rate=0.8, step_offset=0, logical_factor_rules=standard_logical_factor_rules()
  )
  tokens = jnp.ones((16, 64), jnp.int32)

  def init(rng, input_shapes, input_types):
    return Transformer(config).init(rng, tokens, tokens, tokens, enable_dropout=False)

  partitioner = PjitPartitioner(num_partitions=1)
  initializer = TrainStateInitializer(optimizer, init, {}, partitioner)
  return initializer.global_train_state_shape, partitioner


def test_listing_of_the_reference_model_equals_t5xs(reference, shared, tmp_path):
  log_model_info(tmp_path / "new" / "model-info.txt", *reference)
  expected = (shared / "reference/model-info.txt").read_text()
  assert (tmp_path / "new" / "model-info.txt").read_text().splitlines() == expected.splitlines()
  assert (tmp_path / "new" / "model-info.txt").read_text() == expected


def test_listing_contains_axes_partitioning_and_the_number_of_parameters(reference):
  lines = model_info(*reference).splitlines()
  embedding = next(line for line in lines if line.startswith("Variable token_embedder/embedding"))
  assert embedding.split()[1:] == [
    *("token_embedder/embedding", "size", "24576", "shape", "(vocab=384,", "embed=64)"),
    *("partition", "spec", "('model',", "None)"),
  ]
  assert "Total number of parameters: 246784" in lines
  assert lines[-1].split() == [
    "Variable",
    "step",
    "size",
    "1",
    "shape",
    "()",
    *lines[-1].split()[6:],
  ]


def test_an_array_may_have_fewer_axis_names_than_dimensions():
  def state(leaf):
    tree = {"target": {"w": leaf}}
    return types.SimpleNamespace(state_dict=lambda: tree, params=tree["target"])

  partitioner = types.SimpleNamespace(
    get_logical_axes=lambda _: state(PartitionSpec("embed")),
    get_mesh_axes=lambda _: state(PartitionSpec("model")),
  )
  line, total, *_ = model_info(
    state(jax.ShapeDtypeStruct((2, 3), jnp.float32)), partitioner
  ).splitlines()
  assert " ".join(line.split()) == "Variable w size 6 shape (2, 3) partition spec ('model',)"
  assert total == "Total number of parameters: 6"


def test_other_processes_write_nothing(reference, tmp_path, monkeypatch):
  monkeypatch.setattr(jax, "process_index", lambda: 1)
  log_model_info(tmp_path / "model-info.txt", *reference)
  assert not (tmp_path / "model-info.txt").exists()


def test_parameters_are_counted_from_shapes(reference):
  assert count_parameters(reference[0].params) == 246784
