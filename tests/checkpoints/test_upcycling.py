"""Sparse upcycling: experts that start from a dense checkpoint compute what the dense model computes."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from tiny_models import T5_1_1, make_batch, make_model, make_state

from rosetta_t5.checkpoints.arrays.lazy_arrays import as_stored_array
from rosetta_t5.checkpoints.arrays.state_dicts import flatten_arrays
from rosetta_t5.checkpoints.config import RestoreCheckpointConfig
from rosetta_t5.checkpoints.formats import t5x_layouts
from rosetta_t5.checkpoints.mismatch import CheckpointMismatchError
from rosetta_t5.checkpoints.restore import restore_train_state
from rosetta_t5.networks.t5 import Transformer
from rosetta_t5.parallel import PjitPartitioner
from t5x.contrib.moe.checkpoints import UpcycleCheckpointer

DENSE = dataclasses.replace(T5_1_1, num_encoder_layers=2, num_decoder_layers=2)
EXPERTS = dataclasses.replace(
  DENSE, num_experts=4, normalize_expert_weights=True, eval_capacity_factor=4.0
)
ASSIGNMENT_MAP = (
  (r"target(.*)mlp\/expert(.*)", r"target\1mlp\2"),
  (r".*\/router\/.*", None),
  (r"state\/param_states.*", None),
)


@pytest.fixture
def dense(tmp_path):
  """Returns the path of a dense checkpoint."""
  state = make_state(Transformer(DENSE))
  arrays = {n: as_stored_array(x) for n, x in flatten_arrays(state.state_dict()).items()}
  path = tmp_path / "checkpoint_0"
  t5x_layouts.write_orbax(path, arrays)
  return path


def restore(path, config, **options):
  cfg = RestoreCheckpointConfig(path=str(path), mode="specific", **options)
  state = make_state(Transformer(config))
  return restore_train_state(
    path,
    state,
    PjitPartitioner(mesh={"expert": 4}),
    fallback_state=state.state_dict() if cfg.fallback_to_scratch else None,
    transformations=cfg.state_transformation_fns,
  )


def test_the_first_loss_is_the_dense_model_s(dense):
  state = restore(
    dense,
    EXPERTS,
    assignment_map=ASSIGNMENT_MAP,
    checkpointer_cls=UpcycleCheckpointer,
    fallback_to_scratch=True,
  )
  kernel = state.params["encoder"]["layers_1"]["mlp"]["expert"]["wo"]["kernel"]
  assert kernel.sharding.spec[0] == "expert"
  params = jax.device_get(state.params)
  losses = [
    jax.jit(make_model(Transformer(config)).eval_fn)(p, make_batch())[0]
    for config, p in ((EXPERTS, params), (DENSE, make_state(Transformer(DENSE)).params))
  ]
  np.testing.assert_allclose(*losses, rtol=1e-5)


def test_another_number_of_experts_is_refused_by_name(tmp_path):
  state = make_state(Transformer(EXPERTS))
  path = tmp_path / "checkpoint_0"
  arrays = {n: as_stored_array(x) for n, x in flatten_arrays(state.state_dict()).items()}
  t5x_layouts.write_orbax(path, arrays)
  with pytest.raises(CheckpointMismatchError, match="num_experts = 4"):
    restore(path, dataclasses.replace(EXPERTS, num_experts=8))
