"""Conversion between T5X's plain parameter tree and the scalable one with stacked layers."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_t5
import pytest
import scalable_trees
import tiny_models
from flax.traverse_util import flatten_dict, unflatten_dict

from rosetta_t5.checkpoints import CheckpointMismatchError, TrainStateInitializer
from rosetta_t5.checkpoints.arrays.lazy_arrays import as_stored_array
from rosetta_t5.checkpoints.arrays.parameter_trees import (
  convert_tree,
  to_plain_tree,
  to_scalable_tree,
  unstack_layers,
)
from rosetta_t5.checkpoints.manager import OrbaxCheckpointManagerInterface
from rosetta_t5.networks.transformer import Transformer
from rosetta_t5.parallel import PjitPartitioner

CONFIG = dataclasses.replace(tiny_models.T5_1_1, num_encoder_layers=2, num_decoder_layers=3)


def scalable(**switches):
  return Transformer(scalable_trees.scalable(CONFIG, **switches))


PLAIN, SCANNED = Transformer(CONFIG), scalable()


def flat(module):
  params = tiny_models.variables(module)["params"]
  return {"target/" + n: as_stored_array(x) for n, x in flatten_dict(params, sep="/").items()}


@pytest.mark.slow
def test_plain_parameters_in_the_scalable_tree_give_the_same_logits():
  plain = flat(PLAIN)
  scanned = convert_tree(plain, flat(SCANNED))
  params = {n.removeprefix("target/"): jnp.asarray(x.get()) for n, x in scanned.items()}
  batch = tiny_models.make_batch(2)
  inputs, given, wanted = (
    batch[name]
    for name in ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
  )
  apply = functools.partial(SCANNED.apply, enable_dropout=False)
  logits = jax.jit(apply)({"params": unflatten_dict(params, sep="/")}, inputs, given, wanted)
  expected = numpy_t5.compute_logits(plain, np.asarray(inputs), np.asarray(given))
  real = np.asarray(wanted) > 0
  np.testing.assert_allclose(np.asarray(logits)[real], expected[real], atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1])
def test_the_conversion_to_the_scalable_tree_and_back_is_exact(axis):
  plain, target = flat(PLAIN), flat(scalable(param_scan_axis=axis))
  there = convert_tree(plain, target)
  assert {n: x.shape for n, x in there.items()} == {n: x.shape for n, x in target.items()}
  back = convert_tree(there, plain)
  assert set(back) == set(plain)
  for name, array in plain.items():
    np.testing.assert_array_equal(back[name].get(), array.get(), err_msg=name)


def test_converted_trees_equal_those_of_the_networks():
  plain = flat(PLAIN)
  assert {n: x.shape for n, x in to_scalable_tree(plain).items()} == {
    n: x.shape for n, x in flat(SCANNED).items()
  }
  assert {n: x.shape for n, x in to_plain_tree(flat(SCANNED)).items() if "relpos" not in n} == {
    n: x.shape for n, x in plain.items() if "relpos" not in n
  }


def test_different_biases_cannot_become_a_shared_one():
  scanned = flat(SCANNED)
  plain_decoder = {n: x for n, x in flat(PLAIN).items() if "encoder/relpos" not in n}
  with pytest.raises(CheckpointMismatchError, match=r"decoder/relpos_bias.*3 layers differ"):
    convert_tree(scanned, plain_decoder)


def test_a_part_of_a_layer_is_read_from_the_stacked_array():
  whole = as_stored_array(np.arange(24.0).reshape(2, 3, 4))
  apart = unstack_layers({"target/encoder/encoder/mlp/wo/kernel": whole})
  part = apart["target/encoder/layers_2/mlp/wo/kernel"]
  np.testing.assert_array_equal(part.read((slice(0, 1), slice(1, 3))), whole.get()[0:1, 2, 1:3])


PARTITIONER = PjitPartitioner(num_partitions=2)


def initializer(module):
  def init(rng, input_shapes, input_types):
    return tiny_models.initialize(module, rng)

  return TrainStateInitializer(tiny_models.adafactor(), init, {}, PARTITIONER)


def manager(folder, made):
  return OrbaxCheckpointManagerInterface(
    folder, made.global_train_state_shape, PARTITIONER, restore_dtype=None
  )


@pytest.mark.slow
def test_a_scalable_checkpoint_with_equal_biases_restores_into_the_plain_model(tmp_path):
  state = tiny_models.make_state(PLAIN).replace_step(jnp.int32(7))
  made = initializer(PLAIN)
  saver = manager(tmp_path / "plain", made)
  saver.save(state)
  saver.close()

  into_scanned = initializer(SCANNED)
  # The optimizer's state is not converted.
  fresh = tiny_models.make_state(SCANNED).state_dict()
  scanned = manager(tmp_path / "plain", into_scanned).restore(fallback_state=fresh)
  assert int(scanned.step) == 7
  assert scanned.params["encoder"]["encoder"]["attention"]["query"]["kernel"].shape == (16, 2, 4, 4)
  saver = manager(tmp_path / "scanned", into_scanned)
  saver.save(scanned)
  saver.close()

  back = manager(tmp_path / "scanned", made).restore(fallback_state=state.state_dict())
  jax.tree.map(np.testing.assert_array_equal, back.params.unfreeze(), state.params)


def test_a_scalable_checkpoint_with_different_biases_does_not_match_the_plain_model(tmp_path):
  scanned = initializer(SCANNED)
  saver = manager(tmp_path, scanned)
  saver.save(tiny_models.make_state(SCANNED))
  saver.close()
  with pytest.raises(CheckpointMismatchError, match=r"is one relative bias for all layers"):
    manager(tmp_path, initializer(PLAIN)).restore()
