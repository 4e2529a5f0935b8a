"""Mesh TensorFlow's checkpoints are read lazily under T5X's names.

`fixtures/mesh_tf` is a tiny T5 1.1 with Adafactor's slots, written by TensorFlow 2.21.
"""

from __future__ import annotations

import pathlib
import shutil

import numpy as np
import pytest

from rosetta_t5.checkpoints import CheckpointMismatchError, UnreadableCheckpointError
from rosetta_t5.checkpoints.arrays.lazy_arrays import LazyArray
from rosetta_t5.checkpoints.arrays.state_dicts import flatten_state_dict, unflatten_state_dict
from rosetta_t5.checkpoints.checkpoint_folders import (
  CheckpointTypes,
  detect_checkpoint_type,
  read_arrays,
)
from rosetta_t5.checkpoints.formats import mesh_tf
from t5x.checkpoint_importer import restore_from_t5_checkpoint

FOLDER = pathlib.Path(__file__).parent / "fixtures/mesh_tf"


def test_values_are_those_that_were_written():
  arrays = mesh_tf.load_tf_ckpt(FOLDER)
  assert len(arrays) == 106
  expected = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
  np.testing.assert_array_equal(arrays["shared/embedding"].get(), expected)
  assert int(arrays["global_step"].get()) == 1000


def test_a_folder_and_a_prefix_are_recognised():
  assert detect_checkpoint_type(FOLDER) is CheckpointTypes.T5X_TF
  assert detect_checkpoint_type(FOLDER / "model.ckpt-1000") is CheckpointTypes.T5X_TF
  assert set(read_arrays(FOLDER)) == set(read_arrays(FOLDER / "model.ckpt-1000"))


def test_parameters_and_slots_have_t5x_names():
  arrays = read_arrays(FOLDER)
  assert int(arrays["state/step"].get()) == 1000
  raw = mesh_tf.load_tf_ckpt(FOLDER)
  pairs = {
    "target/encoder/relpos_bias/rel_embedding": (
      "encoder/block_000/layer_000/SelfAttention/relative_attention_bias"
    ),
    "target/decoder/layers_1/encoder_decoder_attention/out/kernel": (
      "decoder/block_001/layer_001/EncDecAttention/o"
    ),
    "target/decoder/layers_0/pre_mlp_layer_norm/scale": "decoder/block_000/layer_002/layer_norm/scale",
    "target/decoder/decoder_norm/scale": "decoder/rms_norm/scale",
    "state/param_states/encoder/layers_1/mlp/wi_1/kernel/v": (
      "encoder/block_001/layer_001/DenseReluDense/wi_1/kernel_slot_v"
    ),
    "state/param_states/token_embedder/embedding/v_row": "shared/embedding_slot_vr",
    "state/param_states/token_embedder/embedding/v_col": "shared/embedding_slot_vc",
  }
  for ours, theirs in pairs.items():
    np.testing.assert_array_equal(arrays[ours].get(), raw[theirs].get(), err_msg=ours)
  assert arrays["state/param_states/token_embedder/embedding/v"].shape == (1,)
  assert arrays["state/param_states/decoder/decoder_norm/scale/v_row"].shape == (1,)


def test_restore_checks_shapes_and_can_leave_values_on_disk():
  arrays = read_arrays(FOLDER)
  state = unflatten_state_dict(arrays)
  lazily = restore_from_t5_checkpoint(state, FOLDER, lazy_parameters=True)
  assert isinstance(lazily["target"]["token_embedder"]["embedding"], LazyArray)
  at_once = flatten_state_dict(restore_from_t5_checkpoint(state, FOLDER))
  assert set(at_once) == set(arrays)
  assert isinstance(at_once["target/token_embedder/embedding"], np.ndarray)

  narrow = {"target/token_embedder/embedding": np.zeros((32, 4), np.float32)}
  with pytest.raises(CheckpointMismatchError, match=r"wrong shape"):
    restore_from_t5_checkpoint(unflatten_state_dict(narrow), FOLDER, strict=False)
  fewer = {n: x for n, x in arrays.items() if "decoder_norm" not in n}
  with pytest.raises(CheckpointMismatchError, match=r"5 unexpected"):
    restore_from_t5_checkpoint(unflatten_state_dict(fewer), FOLDER)


def test_a_translator_applies_the_first_matching_rule_and_names_keys_without_one():
  translator = mesh_tf.CheckpointTranslator()

  @translator.add(r"old/(\w+)")
  def rename(opts, key, val, name):
    return (f"{opts['prefix']}/{name}", val + 1) if name != "gone" else (None, None)

  assert translator.apply({"old/a": 1, "old/gone": 2}, prefix="new") == {"new/a": 2}
  with pytest.raises(ValueError, match=r"Unmapped tensor keys exist: other/a \(1 in all\)"):
    translator.apply({"other/a": 1})


def test_a_folder_that_was_moved_or_copied_in_part_is_read(tmp_path):
  copy = tmp_path / "copy"
  shutil.copytree(FOLDER, copy)
  (copy / "checkpoint").write_text('model_checkpoint_path: "/no/such/folder/model.ckpt-1000"\n')
  assert set(mesh_tf.load_tf_ckpt(copy)) == set(mesh_tf.load_tf_ckpt(FOLDER))
  (copy / "checkpoint").unlink()
  assert set(mesh_tf.load_tf_ckpt(copy)) == set(mesh_tf.load_tf_ckpt(FOLDER))
  (copy / "model.ckpt-1000.index").unlink()
  with pytest.raises(ValueError, match=r"is not a TensorFlow checkpoint: there is no file PREFIX"):
    mesh_tf.load_tf_ckpt(copy)


def test_a_missing_prefix_is_not_replaced_by_the_latest():
  with pytest.raises(ValueError, match=r"ckpt-2000 is not a TensorFlow checkpoint"):
    mesh_tf.load_tf_ckpt(FOLDER / "model.ckpt-2000")


def test_a_damaged_index_is_reported(tmp_path):
  shutil.copytree(FOLDER, tmp_path / "copy")
  index = tmp_path / "copy/model.ckpt-1000.index"
  index.write_bytes(index.read_bytes()[:-20])
  with pytest.raises(UnreadableCheckpointError, match=r"model\.ckpt-1000 is damaged: "):
    read_arrays(tmp_path / "copy")


def test_damaged_values_are_reported(tmp_path):
  shutil.copytree(FOLDER, tmp_path / "copy")
  data = tmp_path / "copy/model.ckpt-1000.data-00000-of-00001"
  data.write_bytes(bytes(len(data.read_bytes())))
  with pytest.raises(ValueError, match=r"model\.ckpt-1000 is damaged: "):
    mesh_tf.load_tf_ckpt(tmp_path / "copy")["shared/embedding"].get()
