"""A device whose memory is full: what would help, by this run's own figures."""

from __future__ import annotations

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import pytest
from tiny_models import T5_1_1, make_batch, make_model, make_state

from rosetta_t5.networks.t5 import Transformer
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.plan.out_of_memory import OutOfMemoryError, answered_when_out_of_memory


def complaint(batch, wide=1, **arguments):
  """Returns what a run is told that asks for more than any machine has."""
  config = dataclasses.replace(T5_1_1, emb_dim=16 * wide, mlp_dim=24 * wide)
  model = make_model(Transformer(config))
  state = jax.eval_shape(lambda: make_state(Transformer(config)))
  partitioner = PjitPartitioner(num_partitions=2, **arguments)
  initializer = types.SimpleNamespace(
    global_train_state_shape=state, train_state_axes=partitioner.get_mesh_axes(state)
  )
  with (
    pytest.raises(OutOfMemoryError) as raised,
    answered_when_out_of_memory(None, model, partitioner, initializer, batch),
  ):
    jnp.zeros((1 << 46,), jnp.float32).block_until_ready()
  return str(raised.value)


def test_long_texts_are_answered_with_microbatches_and_rematerialisation():
  said = complaint(make_batch(64, 512, 128))
  assert said.startswith("a device's memory is full: RESOURCE_EXHAUSTED: ")
  assert "Estimated on each device: params " in said
  saved = re.findall(r"  (\S+) = .*# saves about (\S+) [kMG]B", said)
  assert [name for name, _ in saved] == [
    "trainer.Trainer.num_microbatches",
    "network.T5Config.remat_policy",
    "models.EncoderDecoderModel.loss_chunk_length",
  ]


def test_a_model_that_is_large_for_its_batch_is_answered_with_splitting_it():
  said = complaint(make_batch(4, 4, 4), wide=64)
  assert '  partitioning.PjitPartitioner.mesh = {"fsdp": 4, "tensor": 2}   # saves about' in said


def test_other_errors_stay_what_they_are():
  with pytest.raises(ValueError, match="mine"), answered_when_out_of_memory(*[None] * 5):
    raise ValueError("mine")
