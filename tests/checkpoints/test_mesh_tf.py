"""Mesh TensorFlow's checkpoints: read without TensorFlow, named as T5X names them.

`fixtures/mesh_tf` was written by TensorFlow 2.21: a tiny T5 1.1 with Adafactor's slots.
"""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from rosetta_t5.checkpoints import CheckpointMismatchError
from rosetta_t5.checkpoints.arrays.lazy_arrays import LazyArray
from rosetta_t5.checkpoints.arrays.state_dicts import flatten_state_dict, unflatten_state_dict
from rosetta_t5.checkpoints.formats import mesh_tf, tensor_bundle
from rosetta_t5.checkpoints.model_dir.checkpoint_folders import (
  CheckpointTypes,
  detect_checkpoint_type,
)
from rosetta_t5.checkpoints.reading import read_arrays

FOLDER = pathlib.Path(__file__).parent / "fixtures/mesh_tf"


def test_values_are_read_as_numpy_s_generator_drew_them():
  arrays = tensor_bundle.read_arrays(FOLDER)
  assert len(arrays) == 106
  expected = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
  np.testing.assert_array_equal(arrays["shared/embedding"].get(), expected)
  np.testing.assert_array_equal(
    arrays["shared/embedding"].read((slice(3, 5), slice(1, 2))), expected[3:5, 1:2]
  )
  assert int(arrays["global_step"].get()) == 1000


def test_folder_and_prefix_are_recognised():
  assert detect_checkpoint_type(FOLDER) is CheckpointTypes.T5X_TF
  assert detect_checkpoint_type(FOLDER / "model.ckpt-1000") is CheckpointTypes.T5X_TF
  assert tensor_bundle.find_prefix(FOLDER).endswith("mesh_tf/model.ckpt-1000")
  assert set(read_arrays(FOLDER)) == set(read_arrays(FOLDER / "model.ckpt-1000"))


def test_names_and_slots_are_t5x_s():
  arrays = read_arrays(FOLDER)
  assert int(arrays["state/step"].get()) == 1000
  raw = tensor_bundle.read_arrays(FOLDER)
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


def test_restore_checks_shapes_and_can_stay_on_disk():
  arrays = read_arrays(FOLDER)
  state = unflatten_state_dict(arrays)
  lazily = mesh_tf.restore_from_t5_checkpoint(state, FOLDER, lazy_parameters=True)
  assert isinstance(lazily["target"]["token_embedder"]["embedding"], LazyArray)
  at_once = flatten_state_dict(mesh_tf.restore_from_t5_checkpoint(state, FOLDER))
  assert set(at_once) == set(arrays)
  assert isinstance(at_once["target/token_embedder/embedding"], np.ndarray)

  narrow = {"target/token_embedder/embedding": np.zeros((32, 4), np.float32)}
  with pytest.raises(CheckpointMismatchError, match=r"wrong shape"):
    mesh_tf.restore_from_t5_checkpoint(unflatten_state_dict(narrow), FOLDER, strict=False)
  fewer = {n: x for n, x in arrays.items() if "decoder_norm" not in n}
  with pytest.raises(CheckpointMismatchError, match=r"5 unexpected"):
    mesh_tf.restore_from_t5_checkpoint(unflatten_state_dict(fewer), FOLDER)


def test_translator_applies_the_first_rule_and_names_what_has_none():
  translator = mesh_tf.CheckpointTranslator()

  @translator.add(r"old/(\w+)")
  def rename(opts, key, val, name):
    return (f"{opts['prefix']}/{name}", val + 1) if name != "gone" else (None, None)

  assert translator.apply({"old/a": 1, "old/gone": 2}, prefix="new") == {"new/a": 2}
  with pytest.raises(ValueError, match=r"Unmapped tensor keys exist: other/a \(1 in all\)"):
    translator.apply({"other/a": 1})


@pytest.mark.slow
def test_reader_agrees_with_tensorflow():
  import tensorflow as tf

  theirs = tf.train.load_checkpoint(str(FOLDER))
  arrays = tensor_bundle.read_arrays(FOLDER)
  assert set(arrays) == set(theirs.get_variable_to_shape_map())
  for name, array in arrays.items():
    np.testing.assert_array_equal(array.get(), theirs.get_tensor(name))
