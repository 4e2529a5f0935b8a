"""Users' checkpointers, partitioners and inference steps, written for T5X."""

from __future__ import annotations

import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from tiny_models import Bigram, make_model

from rosetta_t5.user_errors import exit_on_user_error
from t5x import checkpoints, partitioning, utils
from t5x.examples.scalable_t5 import layers as scalable_layers


def make_initializer(partitioner=None):
  model = make_model(Bigram())
  return utils.TrainStateInitializer(
    optimizer_def=model.optimizer_def,
    init_fn=model.get_initial_variables,
    input_shapes={"encoder_input_tokens": (8, 4), "decoder_input_tokens": (8, 4)},
    partitioner=partitioner or partitioning.PjitPartitioner(num_partitions=1),
  )


class Tenfold(checkpoints.Checkpointer):
  """Multiplies what it restores by ten."""

  def restore(self, *args, **kwargs):
    state = super().restore(*args, **kwargs)
    return state.replace_params(jax.tree.map(lambda x: 10 * x, state.params))


def test_a_checkpointer_with_a_restore_of_its_own_restores(tmp_path):
  initializer = make_initializer()
  state = initializer.from_scratch(jax.random.PRNGKey(0))
  partitioner = partitioning.PjitPartitioner(num_partitions=1)
  checkpoints.Checkpointer(state, partitioner, str(tmp_path)).save(state)

  def restored(checkpointer_cls):
    cfg = utils.RestoreCheckpointConfig(path=str(tmp_path), checkpointer_cls=checkpointer_cls)
    return initializer.from_checkpoint([cfg]).params["table"]

  table = np.asarray(state.params["table"])
  np.testing.assert_array_equal(restored(checkpoints.SaveBestCheckpointer), table)
  np.testing.assert_array_equal(restored(Tenfold), 10 * table)


def test_the_methods_of_t5xs_own_checkpointer_do_not_count_as_a_users(tmp_path):
  initializer = make_initializer()
  manager = utils.create_orbax_checkpoint_manager(
    save_cfg=utils.SaveCheckpointConfig(checkpointer_cls=checkpoints.Checkpointer),
    restore_cfg=utils.RestoreCheckpointConfig(path=None, checkpointer_cls=checkpoints.Checkpointer),
    train_state=initializer.global_train_state_shape,
    partitioner=partitioning.PjitPartitioner(num_partitions=1),
    model_dir=str(tmp_path),
  )
  assert (manager.user_save, manager.user_restore) == (None, None)


def test_an_error_of_t5xs_modules_about_the_users_input_has_no_traceback(capsys):
  with pytest.raises(SystemExit) as ended, exit_on_user_error():
    partitioning.get_mesh((3, 1, 1, 1), input_devices=jax.devices())
  assert ended.value.code == 1
  assert "error: cannot reshape array of size 8 into shape (3)" in capsys.readouterr().err


def test_a_partitioner_may_use_pjit_with_partition_specs():
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pjit import pjit
  mesh = Mesh(np.array(jax.devices()).reshape(8, 1), ("data", "model"))
  spec = PartitionSpec("data")
  doubled = pjit(lambda x: 2 * x, in_shardings=spec, out_shardings=spec)
  found = partitioning.PjittedFnWithContext(doubled, mesh)(np.ones(8))
  assert found.sharding.spec == spec


def test_an_inference_step_gets_the_mutable_collections():
  def infer_step(params, batch, flax_mutables):
    return batch["x"] * params["w"] + flax_mutables["bias"]

  def state(of):
    return types.SimpleNamespace(params={"w": of(3.0)}, flax_mutables={"bias": of(0.5)})

  partitioner = partitioning.PjitPartitioner(num_partitions=1)
  infer = utils.get_infer_fn(infer_step, 8, state(lambda _: PartitionSpec()), partitioner)
  rows = infer([(n, {"x": np.float32(n)}) for n in range(3)], state(jnp.float32))
  assert rows == [(0, 0.5), (1, 3.5), (2, 6.5)]


def test_an_initializer_may_need_the_dimensions_of_inputs_and_outputs():
  def ones(key, shape, dtype, in_axis, out_axis):
    return jnp.ones(shape, dtype) * (in_axis + 1) / out_axis

  dense = scalable_layers.DenseGeneral(features=(2, 3), kernel_init=ones)
  out, variables = dense.init_with_output(jax.random.PRNGKey(0), jnp.ones((1, 4)))
  np.testing.assert_array_equal(out, np.full((1, 2, 3), 4.0))
  assert variables["params"]["kernel"].shape == (4, 2, 3)
