"""Inference and conversion use the average of a checkpoint whose optimizer has one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rosetta_t5.checkpoints.arrays.lazy_arrays import as_stored_array
from rosetta_t5.checkpoints.arrays.state_dicts import flatten_arrays
from rosetta_t5.checkpoints.restore import find_matching_arrays
from rosetta_t5.training.optimizers import optax_wrapper as optimizers
from rosetta_t5.training.optimizers.guards import SpikeGuard
from rosetta_t5.training.optimizers.optax_wrapper import average_parameters

PARAMS = {"layer": {"kernel": jnp.ones((4, 3)), "bias": jnp.zeros(3)}}
AVERAGING = {
  "average": lambda: optimizers.chain([optax.lion(0.1), average_parameters(0.5)]),
  "schedule_free": lambda: optimizers.chain([optax.contrib.schedule_free_adamw(0.1)]),
  "guarded": lambda: SpikeGuard(optimizers.chain([optax.contrib.schedule_free_adamw(0.1)])),
}


@pytest.mark.parametrize("name", AVERAGING)
def test_inference_gets_the_parameters_that_the_run_evaluates(name):
  definition = AVERAGING[name]()
  optimizer = definition.create(PARAMS)
  for _ in range(3):
    optimizer = optimizer.apply_gradient(jax.tree.map(jnp.ones_like, PARAMS))
  want = definition.params_to_evaluate(optimizer.target, optimizer.state.param_states)
  assert jnp.any(want["layer"]["kernel"] != optimizer.target["layer"]["kernel"])
  stored = {n: as_stored_array(x) for n, x in flatten_arrays(optimizer.state_dict()).items()}
  expected = {"target": PARAMS, "state": {"step": jnp.zeros((), jnp.int32)}}
  found = find_matching_arrays("folder", expected, arrays=stored)
  for part in ("kernel", "bias"):
    array = found[f"target/layer/{part}"]
    np.testing.assert_allclose(array.get(), want["layer"][part], rtol=1e-6)
  np.testing.assert_allclose(
    found["target/layer/kernel"].read((slice(1, 2), slice(0, 2))),
    want["layer"]["kernel"][1:2, :2],
    rtol=1e-6,
  )
