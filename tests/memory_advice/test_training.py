"""Advice for a training run whose device is out of memory."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import pytest
from tiny_models import T5_1_1, make_batch, make_model, make_state

from rosetta_t5.memory_advice import OutOfMemoryError, explain_out_of_memory
from rosetta_t5.networks.t5 import Transformer
from rosetta_t5.parallel import PjitPartitioner

TRAINER = types.SimpleNamespace(num_microbatches=1)


def error_text(batch, wide=1, trainer=TRAINER, sizes=None, **arguments):
  """Returns the error of a run that needs more memory than any machine has."""
  config = dataclasses.replace(T5_1_1, emb_dim=16 * wide, mlp_dim=24 * wide, **(sizes or {}))
  model = make_model(Transformer(config))
  state = jax.eval_shape(lambda: make_state(Transformer(config)))
  partitioner = PjitPartitioner(**({"num_partitions": 2} | arguments))
  feed = types.SimpleNamespace(element_spec=batch)
  initializer = types.SimpleNamespace(
    global_train_state_shape=state, train_state_axes=partitioner.get_mesh_axes(state)
  )
  with (
    pytest.raises(OutOfMemoryError) as raised,
    explain_out_of_memory(model, partitioner, initializer, feed, trainer),
  ):
    jnp.zeros((1 << 46,), jnp.float32).block_until_ready()
  return str(raised.value)


@contextlib.contextmanager
def devices_of(monkeypatch, size):
  """Inside the `with`, the first device reports this many bytes, as GPUs do."""
  device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": size})
  with monkeypatch.context() as patched:
    patched.setattr(jax, "local_devices", lambda: [device])
    yield


def test_long_texts_get_microbatches_and_rematerialization():
  # With one layer, rematerialization would save nothing: that layer is recomputed.
  sizes = {"num_encoder_layers": 2, "num_decoder_layers": 2, "vocab_size": 32768}
  message = error_text(make_batch(64, 512, 128), sizes=sizes)
  assert message.startswith("a device is out of memory: RESOURCE_EXHAUSTED: ")
  assert "Estimated on each device: params " in message
  saved = re.findall(r"  (\S+) = .*# saves about (\S+) [kMG]B", message)
  assert sorted(name for name, _ in saved) == [
    "models.EncoderDecoderModel.loss_chunk_length",
    "network.T5Config.remat_policy",
    "trainer.Trainer.num_microbatches",
  ]


@pytest.mark.parametrize(("megabytes", "parts"), [(1000, 2), (100, 4), (10, 16), (1, 16)])
def test_the_smallest_number_of_microbatches_that_fits_is_proposed_else_the_largest(
  monkeypatch, megabytes, parts
):
  # 139 MB of activations for the 16 examples on each device, and 37 MB of relative biases.
  with devices_of(monkeypatch, megabytes * 1e6):
    message = error_text(make_batch(64, 512, 128))
  assert f"  trainer.Trainer.num_microbatches = {parts}   # saves about" in message


def test_a_model_that_is_large_for_its_batch_must_be_sharded():
  message = error_text(make_batch(4, 4, 4), wide=64)
  assert '  partitioning.PjitPartitioner.mesh = {"fsdp": 4, "tensor": 2}   # saves about' in message


def test_while_the_state_is_initialized_only_sharding_is_proposed():
  message = error_text(make_batch(64, 512, 128), wide=64, trainer=None)
  assert re.search(r"Estimated on each device: params \S+ MB, optimizer \S+ [kM]B\. What", message)
  assert re.findall(r"^  (.*)   # saves about \S+ [kMG]B$", message, re.MULTILINE) == [
    'partitioning.PjitPartitioner.mesh = {"fsdp": 4, "tensor": 2}',
    "partitioning.PjitPartitioner.zero1 = True",
  ]


def test_a_mesh_that_shards_more_keeps_its_other_axes():
  mesh = {"pipeline": 2, "data": 2, "context": 2}
  message = error_text(make_batch(4, 4, 4), wide=64, trainer=None, mesh=mesh, num_partitions=1)
  assert 'mesh = {"fsdp": 2, "pipeline": 2, "context": 2}   # saves about' in message


def test_a_state_that_needs_more_devices_gets_their_number(monkeypatch):
  # Each of the eight devices needs 5 MB.
  with devices_of(monkeypatch, 2e6):
    message = error_text(
      make_batch(4, 4, 4), wide=64, trainer=None, mesh={"fsdp": 8}, num_partitions=1
    )
  assert (
    '  partitioning.PjitPartitioner.mesh = {"fsdp": 32}   # on 32 devices: saves about' in message
  )
  assert message.count("partitioning.") == 1
  # This is known before the state is allocated.
  assert re.search(
    r"Out of memory: the state needs [\d.]+ MB on each device, which has 2 MB", message
  )


def test_a_state_that_fits_according_to_the_estimate_but_not_in_fact_needs_twice_the_devices():
  message = error_text(make_batch(4, 4, 4), wide=64, mesh={"fsdp": 8}, num_partitions=1)
  best = 'partitioning.PjitPartitioner.mesh = {"fsdp": 16}   # on 16 devices: saves about'
  assert message.splitlines()[2].strip().startswith(best)


def test_other_errors_are_unchanged():
  with pytest.raises(ValueError, match="mine"), explain_out_of_memory(*[None] * 4):
    raise ValueError("mine")
