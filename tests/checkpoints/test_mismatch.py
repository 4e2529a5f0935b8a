"""Comparison of a checkpoint with the run's model before anything is read."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from rosetta_t5.checkpoints import CheckpointMismatchError, RestoreCheckpointConfig
from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.arrays.state_dicts import unflatten_state_dict
from rosetta_t5.checkpoints.restore import (
  Mismatch,
  find_matching_arrays,
  find_mismatches,
  mismatch_error,
)


def struct(*shape, dtype=np.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


def saved(setup, path, step=1):
  manager = setup.manager(path)
  manager.save(setup.state(step=step))
  manager.close()
  return path / f"checkpoint_{step}"


def test_equal_names_shapes_and_dtype_kinds_match():
  stored = {"target/a": struct(2, 3, dtype=np.float16), "state/step": struct(dtype=np.int64)}
  expected = {"target/a": struct(2, 3), "state/step": struct(dtype=np.int32)}
  assert find_mismatches(stored, expected) == []


def test_another_kind_of_dtype_is_a_mismatch():
  stored, expected = {"target/a": struct(2, dtype=np.int8)}, {"target/a": struct(2)}
  assert find_mismatches(stored, expected) == [
    Mismatch("wrong dtype", "target/a", "(2,) int8", "(2,) float32")
  ]


def test_inference_ignores_optimizer_state():
  stored = {"target/a": struct(2), "state/param_states/a/v": struct(2)}
  assert find_mismatches(stored, {"target/a": struct(2)}) == []
  assert find_mismatches(stored, {"target/a": struct(2), "state/param_states/a/m": struct(2)}) != []


def test_another_width_is_reported_in_a_table(setup, make_setup, tmp_path):
  path = saved(setup, tmp_path)
  wider = make_setup(module=type(setup.module)(width=32))
  with pytest.raises(CheckpointMismatchError) as caught:
    wider.manager(tmp_path).restore()
  lines = str(caught.value).splitlines()
  assert lines[0] == f"checkpoint {path} does not match this run's model: 4 wrong shape"
  assert lines[1].split() == ["problem", "name", "checkpoint", "model"]
  assert "target/wi" in lines[2]
  assert "(8, 16) float32" in lines[2]
  assert "(8, 32) float32" in lines[2]
  assert "--gin.MODEL_DIR=" in lines[-1]
  assert "config.gin" in lines[-1]


def test_only_a_checkpoint_without_any_decoder_is_taken_for_an_encoder():
  def text(*names):
    missing = [Mismatch("missing", f"target/decoder/{name}") for name in names]
    return str(mismatch_error("checkpoint_1", missing))

  assert "encoder without a decoder" in text("decoder_norm/scale", "layers_0/mlp/wo/kernel")
  assert "encoder without a decoder" not in text("layers_1/mlp/wo/kernel")


def test_a_renamed_parameter_is_reported_with_the_similar_name(setup, make_setup, tmp_path):
  saved(setup, tmp_path)
  renamed = make_setup(module=type(setup.module)(out_name="wo_0"))
  with pytest.raises(CheckpointMismatchError) as caught:
    renamed.manager(tmp_path).restore()
  text = str(caught.value)
  assert "5 missing, 5 unexpected" in text
  assert "missing     target/wo_0" in text


def test_under_another_optimizer_the_state_starts_anew_and_this_is_reported(
  setup, adam_setup, tmp_path, caplog
):
  saved(setup, tmp_path)
  restored = adam_setup.manager(tmp_path).restore()
  assert "its optimizer state is not used, and this run's is initialized" in caplog.text
  assert restored.step == 1
  jax.tree.map(np.testing.assert_array_equal, restored.params, setup.state(step=1).params)
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(restored.param_states))


def test_long_tables_are_truncated():
  mismatches = [
    Mismatch("missing", f"target/layer_{i}", expected="(2,) float32") for i in range(50)
  ]
  lines = str(mismatch_error("p", mismatches)).splitlines()
  assert lines[-2] == "  ... and 30 more"
  assert len(lines) == 24


def test_nothing_is_read_when_names_differ():
  def fail(index):
    raise AssertionError("an array was read before the comparison")

  arrays = {"target/a": StoredArray((2,), np.float32, fail)}
  with pytest.raises(CheckpointMismatchError):
    find_matching_arrays("here", {"target": {"b": struct(2)}}, arrays=arrays)


def test_only_missing_names_come_from_the_fallback_state(setup, make_setup, tmp_path):
  saved(setup, tmp_path)
  renamed = make_setup(module=type(setup.module)(out_name="wo_0"))
  scratch = renamed.state(seed=5)
  manager = renamed.manager(tmp_path)
  manager.strict = False
  restored = manager.restore(fallback_state=scratch.state_dict())
  np.testing.assert_array_equal(restored.params["wo_0"], scratch.params["wo_0"])
  np.testing.assert_array_equal(restored.params["wi"], setup.state().params["wi"])
  with pytest.raises(CheckpointMismatchError, match=r"1 unexpected"):
    renamed.manager(tmp_path).restore(fallback_state=scratch.state_dict())


def test_optimizer_state_that_no_such_checkpoint_has_is_not_counted_as_missing():
  arrays = {"target/token_embedder/embedding": np.zeros((34, 8), np.float32)}
  expected = {
    "target/token_embedder/embedding": struct(32, 8),
    "state/param_states/token_embedder/embedding/v": struct(32, 8),
    "state/step": struct(dtype=np.int32),
  }
  with pytest.raises(CheckpointMismatchError) as caught:
    find_matching_arrays("p", unflatten_state_dict(expected), arrays=arrays, allow_missing=True)
  text = str(caught.value)
  assert "does not match this run's model: 1 wrong shape\n" in text
  assert "fallback_to_scratch" not in text
  assert "RestoreCheckpointConfig.resize_vocabulary = True adds rows" in text


@pytest.mark.parametrize("rows", [3, 6])
def test_tables_of_tokens_get_the_models_number_of_rows(rows, caplog):
  table = np.arange(8, dtype=np.float32).reshape(4, 2)
  cfg = RestoreCheckpointConfig("p", "specific", resize_vocabulary=True)
  arrays = {"target/token_embedder/embedding": table, "target/decoder/logits_dense/kernel": table.T}
  shapes = {
    "token_embedder": {"embedding": struct(rows, 2)},
    "decoder": {"logits_dense": {"kernel": struct(2, rows)}},
  }
  found = find_matching_arrays(
    "p", {"target": shapes}, arrays=arrays, transformations=cfg.state_transformation_fns
  )
  expected = np.concatenate([table, [[3, 4], [3, 4]]])[:rows]
  np.testing.assert_array_equal(found["target/token_embedder/embedding"].get(), expected)
  np.testing.assert_array_equal(found["target/decoder/logits_dense/kernel"].get(), expected.T)
  assert caplog.text.count(f"{rows} rows instead of 4 (resize_vocabulary)") == 2
  with pytest.raises(CheckpointMismatchError, match="1 unexpected"):
    find_matching_arrays(
      "p",
      {"target": shapes},
      arrays=arrays | {"target/other": table},
      transformations=cfg.state_transformation_fns,
    )
