"""Optimizers on a mesh compute the steps of one device, and their state is split and restored."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from test_partitioner import OneDevice, place
from tiny_models import DECODER_ONLY, decoder_only_variables, make_batch, make_decoder_only_model

from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.training import Trainer, TrainState
from rosetta_t5.training.optimizers import optax_wrapper as optimizers
from rosetta_t5.training.optimizers.matrices import shampoo, soap
from rosetta_t5.training.optimizers.transformations import muon, precondition_by_kfac, sophia

CONFIG = DECODER_ONLY.replace(positions="rotary", scan_layers=True, remat_policy="minimal")
MESHES = {
  "data, fsdp, tensor": {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}},
  "zero1": {"mesh": {"data": 4, "tensor": 2}, "zero1": True},
}
OPTIMIZERS = {
  "kfac": [
    functools.partial(
      precondition_by_kfac, factor_update_steps=2, inv_update_steps=2, kl_clip=1e-6
    ),
    optax.sgd,  # LAMB would amplify rounding errors
  ],
  # The covariance of a side that is larger than the other has no unique eigenvectors at first.
  "soap": [functools.partial(soap, precondition_frequency=2, max_precond_dim=16)],
  "shampoo": [functools.partial(shampoo, precondition_frequency=2, matrix_eps=1e-2)],
  "muon": [muon],
  "lion": [optax.lion],
  "sophia": [functools.partial(sophia, update_interval=2)],
  "ademamix": [optax.contrib.ademamix],
  "schedule_free": [optax.contrib.schedule_free_adamw],
  "prodigy": [optax.contrib.prodigy],
}


def train(name, partitioner, steps, saved=None):
  """Returns the state after some steps, those of a saved state dict included."""
  definition = optimizers.chain(OPTIMIZERS[name])
  state = TrainState.create(definition, decoder_only_variables(CONFIG))
  first = 0
  if saved is not None:
    state, first = state.restore_state(saved), int(saved["state"]["step"])
  state, axes = place(state, partitioner)
  trainer = Trainer(
    make_decoder_only_model(CONFIG),
    state,
    partitioner,
    (),
    None,
    axes,
    jax.random.PRNGKey(0),
    learning_rate_fn=lambda step: jnp.float32(0.01),
    num_microbatches=2,
  )
  sharding = NamedSharding(partitioner.mesh, partitioner.data_partition_spec)
  rows = ({n: v for n, v in make_batch(8, seed=s).items() if n[0] == "d"} for s in range(9))
  batches = (jax.device_put(row, sharding) for row in list(rows)[first:])
  trainer.train(batches, steps - first).result()
  trainer.close()
  return trainer.train_state


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_mesh_computes_the_steps_of_one_device_and_continues_a_saved_state(name, mesh):
  partitioner, one_device = PjitPartitioner(**MESHES[mesh]), OneDevice(num_partitions=1)
  assert_close(train(name, partitioner, 1), train(name, one_device, 1))
  # Both make the third step from the same state, because SOAP amplifies rounding errors: directions
  # with nearly equal eigenvalues are mixed, and Adam then moves each by the learning rate.
  saved = jax.device_get(train(name, partitioner, 2).state_dict())
  restarted = train(name, partitioner, 3, saved)
  assert_close(restarted, train(name, one_device, 3, saved))
  whole = train(name, partitioner, 3)
  jax.tree.map(np.testing.assert_array_equal, restarted.params, whole.params)
  jax.tree.map(np.testing.assert_array_equal, restarted.param_states, whole.param_states)
  # Every array of the state with two dimensions of a matrix is split.
  for path, leaf in jax.tree_util.tree_leaves_with_path(whole.param_states):
    if "wi_0" in str(path) and leaf.ndim == 3:
      assert leaf.addressable_shards[0].data.size * 4 <= leaf.size, path


def assert_close(found, want):
  """Asserts that the parameters are equal except for rounding errors."""
  for x, y in zip(jax.tree.leaves(found.params), jax.tree.leaves(want.params), strict=True):
    # Adam's first steps have the size of the learning rate, 0.01, however small the gradient is.
    assert np.mean(np.isclose(x, y, rtol=1e-3, atol=1e-4)) > 0.99
