"""T5X's assignment maps, which assign the checkpoint's values to the model's names."""

from __future__ import annotations

import numpy as np
import pytest

from rosetta_t5.checkpoints import (
  CheckpointMismatchError,
  RestoreCheckpointConfig,
  create_orbax_checkpoint_manager,
)
from rosetta_t5.checkpoints.arrays.state_dicts import apply_assignment_map
from rosetta_t5.checkpoints.train_state_initializer import restore


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
  with pytest.raises(ValueError, match=r"assigns 'target/wii' .*similar names in it: target/wi"):
    apply_assignment_map({"target": {"wi": 1}}, {"target": {"w": 0}}, [("target/w", "target/wii")])
  with pytest.raises(
    ValueError, match=r"Unused patterns \['target/wx'\].*similar to the first: target/wi"
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
  cfg = RestoreCheckpointConfig(path, "specific", **fields)
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
