"""State dicts: renamed by an assignment map, repeated for experts, and averaged."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import freeze
from tiny_models import T5_1_1, make_batch, make_model, make_state

from rosetta_t5.checkpoints import (
  CheckpointMismatchError,
  RestoreCheckpointConfig,
  create_orbax_checkpoint_manager,
)
from rosetta_t5.checkpoints.arrays import state_dicts
from rosetta_t5.checkpoints.arrays.lazy_arrays import as_stored_array
from rosetta_t5.checkpoints.arrays.state_dicts import apply_assignment_map, flatten_arrays
from rosetta_t5.checkpoints.formats import t5x_layouts
from rosetta_t5.checkpoints.restore import find_matching_arrays, restore_train_state
from rosetta_t5.checkpoints.train_state_initializer import restore
from rosetta_t5.networks.transformer import Transformer
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.training.optimizers import optax_wrapper as optimizers
from rosetta_t5.training.optimizers.composite import SpikeGuard
from rosetta_t5.training.optimizers.transformations import average_parameters
from t5x.checkpoints import get_name_tree, intersect_state
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
PARAMS = {"layer": {"kernel": jnp.ones((4, 3)), "bias": jnp.zeros(3)}}
AVERAGING = {
  "average": lambda: optimizers.chain([optax.lion(0.1), average_parameters(0.5)]),
  "schedule_free": lambda: optimizers.chain([optax.contrib.schedule_free_adamw(0.1)]),
  "guarded": lambda: SpikeGuard(optimizers.chain([optax.contrib.schedule_free_adamw(0.1)])),
}


def test_unflattening_restores_empty_nodes():
  nested = {"a": {"b": 1, "c": {}}, "d": 2}
  flat = state_dicts.flatten_state_dict(nested, keep_empty_nodes=True)
  assert set(flat) == {"a/b", "a/c", "d"}
  assert state_dicts.unflatten_state_dict(flat) == nested
  assert state_dicts.flatten_state_dict(freeze(nested)) == {"a/b": 1, "d": 2}


def test_name_tree_has_a_name_in_place_of_each_leaf():
  assert get_name_tree({"a": {"b": 1}}) == {"a": {"b": "a/b"}}
  assert get_name_tree({"a": {"b": {}}}, keep_empty_nodes=True) == {"a": {"b": "a/b"}}


def test_the_intersection_has_the_values_of_the_first_state():
  assert intersect_state({"a": {"b": 1, "c": 2}}, {"a": {"b": 9}}) == {"a": {"b": 1}}


def test_merging_adds_missing_values_or_overwrites_all():
  mine, scratch = {"a": {"b": 1}}, {"a": {"b": 9, "c": 2}}
  assert state_dicts.merge_state(mine, scratch) == {"a": {"b": 1, "c": 2}}
  assert state_dicts.merge_state(mine, scratch, overwrite=True) == {"a": {"b": 9, "c": 2}}


def test_the_first_rule_that_matches_the_whole_name_applies():
  stored = {"target": {"old_0": 1, "old_1": 2, "same": 3, "left": 4}}
  model = {"target": {"new_0": 0, "new_1": 0, "same": 0, "fresh": 0}}
  rules = [
    (r"target/new_(\d)", r"target/old_\1"),
    (r"target/new_1", "target/left"),
    ("target/fresh", None),
  ]
  result = apply_assignment_map(stored, model, rules[::2])
  assert result == {"target": {"new_0": 1, "new_1": 2, "same": 3, "left": 4}}


def test_rules_can_form_a_cycle_and_use_one_value_twice():
  stored = {"a": 1, "b": 2, "c": 3}
  rotated = apply_assignment_map(stored, dict(stored), [("a", "b"), ("b", "c"), ("c", "a")])
  assert rotated == {"a": 2, "b": 3, "c": 1}
  assert apply_assignment_map({"a": 1}, {"a": 0, "x": 0}, [("x", "a")]) == {"a": 1, "x": 1}


def test_a_resumed_run_is_not_renamed():
  assert apply_assignment_map({"a": 1}, {"b": 0}, [("b", "z")], is_resuming=True) == {"a": 1}


def test_errors_for_typos_list_similar_names():
  with pytest.raises(ValueError, match=r"assigns 'target/wii' .*did you mean 'target/wi'"):
    apply_assignment_map({"target": {"wi": 1}}, {"target": {"w": 0}}, [("target/w", "target/wii")])
  with pytest.raises(
    ValueError, match=r"Unused patterns \['target/wx'\].*did you mean 'target/wi'"
  ):
    apply_assignment_map({"target": {"wi": 1}}, {"target": {"wi": 0}}, [("target/wx", "target/wi")])


@pytest.mark.parametrize(
  ("rule", "reason"), [(("(", "b"), "missing"), (("a", r"\2"), "invalid group")]
)
def test_wrong_rules_are_named(rule, reason):
  with pytest.raises(ValueError, match=rf"assignment_map: the rule .* is wrong: {reason}"):
    apply_assignment_map({"a": 1}, {"a": 0}, [rule])


@pytest.fixture
def saved(setup, tmp_path):
  manager = setup.manager(tmp_path)
  manager.save(setup.state(step=4))
  manager.close()
  return str(tmp_path / "checkpoint_4")


def restored(setup, path, fallback_state=None, **fields):
  given = RestoreCheckpointConfig(path, "latest", **fields)
  cfg = dataclasses.replace(given, mode="specific")  # a copy, as evaluations make
  manager = create_orbax_checkpoint_manager(
    restore_cfg=cfg,
    train_state=setup.initializer.global_train_state_shape,
    partitioner=setup.partitioner,
  )
  return restore(manager, path, cfg, fallback_state)


def test_a_renamed_parameter_is_restored_with_its_optimizer_state(setup, make_setup, saved):
  renamed = make_setup(module=type(setup.module)(out_name="wo_0"))
  state = restored(renamed, saved, assignment_map=[(r"(.*)/wo_0(.*)", r"\1/wo\2")])
  expected = setup.state(step=4)
  np.testing.assert_array_equal(state.params["wo_0"], expected.params["wo"])
  np.testing.assert_array_equal(state.param_states["wo_0"].v, expected.param_states["wo"].v)
  assert int(state.step) == 4


def test_parameters_that_the_map_omits_need_a_fallback_state(setup, saved):
  rules = [("target/wo", None)]
  with pytest.raises(CheckpointMismatchError, match=r"1 missing"):
    restored(setup, saved, assignment_map=rules)
  scratch = setup.state(seed=7)
  state = restored(setup, saved, scratch.state_dict(), assignment_map=rules)
  np.testing.assert_array_equal(state.params["wo"], scratch.params["wo"])
  np.testing.assert_array_equal(state.params["wi"], setup.state().params["wi"])


def test_transformations_change_the_restored_state(setup, saved):
  def doubled(state_dict, target_state_dict):
    assert set(target_state_dict["target"]) == {"wi", "wo"}
    return state_dict | {"target": {n: np.asarray(x) * 2 for n, x in state_dict["target"].items()}}

  state = restored(setup, saved, state_transformation_fns=[doubled])
  np.testing.assert_array_equal(state.params["wi"], 2 * setup.state().params["wi"])


def test_transformations_change_the_saved_state(setup, tmp_path):
  def without_second_moments(state_dict, parameter_infos):
    assert parameter_infos["target"]["wi"].name == "target/wi"
    assert parameter_infos["target"]["wi"].shape == (8, 16)
    return {"target": state_dict["target"], "state": {"step": state_dict["state"]["step"]}}, None

  manager = setup.manager(tmp_path)
  manager.save(setup.state(step=1), state_transformation_fns=[without_second_moments])
  manager.close()
  # Optimizer state that is missing as a whole is initialized; a missing part would be an error.
  state = setup.manager(tmp_path).restore()
  np.testing.assert_array_equal(
    state.param_states["wi"].v, np.zeros_like(state.param_states["wi"].v)
  )
  np.testing.assert_array_equal(state.params["wi"], setup.state().params["wi"])


@pytest.fixture
def dense(tmp_path):
  """Returns the path of a dense checkpoint."""
  state = make_state(Transformer(DENSE))
  arrays = {n: as_stored_array(x) for n, x in flatten_arrays(state.state_dict()).items()}
  path = tmp_path / "checkpoint_0"
  t5x_layouts.write_orbax(path, arrays)
  return path


def restore_experts(path, config, **options):
  cfg = RestoreCheckpointConfig(path=str(path), mode="specific", **options)
  state = make_state(Transformer(config))
  return restore_train_state(
    path,
    state,
    PjitPartitioner(mesh={"expert": 4}),
    fallback_state=state.state_dict() if cfg.fallback_to_scratch else None,
    transformations=cfg.state_transformation_fns,
  )


@pytest.mark.slow
def test_the_first_loss_is_the_dense_model_s(dense):
  state = restore_experts(
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


@pytest.mark.slow
def test_another_number_of_experts_is_refused_by_name(tmp_path):
  state = make_state(Transformer(EXPERTS))
  path = tmp_path / "checkpoint_0"
  arrays = {n: as_stored_array(x) for n, x in flatten_arrays(state.state_dict()).items()}
  t5x_layouts.write_orbax(path, arrays)
  with pytest.raises(
    CheckpointMismatchError, match=r"wrong shape +target/decoder/layers_1/mlp/expert/wi_0/kernel"
  ):
    restore_experts(path, dataclasses.replace(EXPERTS, num_experts=8))


@pytest.mark.one_quick_variant
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
