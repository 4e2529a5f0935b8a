"""Programs that use only T5X's names: a training loop, checkpoints, inference, meshes, gin flags."""

from __future__ import annotations

import functools
import types

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from tiny_models import Bigram, make_model, variables

from t5x import (
  checkpoints,
  decoding,
  gin_utils,
  partitioning,
  state_utils,
  train,
  train_state,
  trainer,
  utils,
)

BATCH = 8
LENGTHS = {"encoder_input_tokens": 6, "decoder_input_tokens": 5}


@pytest.fixture(scope="module")
def program():
  """The objects of a T5X program: model, partitioner, initializer, state."""
  model = make_model(Bigram())
  partitioner = partitioning.PjitPartitioner(num_partitions=2)
  shapes = {name: (BATCH, length) for name, length in LENGTHS.items()}
  shapes["decoder_target_tokens"] = shapes["decoder_input_tokens"]
  initializer = utils.TrainStateInitializer(
    optimizer_def=model.optimizer_def,
    init_fn=model.get_initial_variables,
    input_shapes=shapes,
    partitioner=partitioner,
  )
  state = initializer.from_checkpoint_or_scratch([], init_rng=jax.random.PRNGKey(0))
  return types.SimpleNamespace(
    model=model, partitioner=partitioner, initializer=initializer, state=state
  )


def _batch() -> dict[str, jax.Array]:
  spec = {
    name: jax.ShapeDtypeStruct((BATCH, length), jnp.int32) for name, length in LENGTHS.items()
  }
  batch = {name: zeros + 3 for name, zeros in utils.get_zeros_batch_like_spec(spec).items()}
  targets = batch["decoder_input_tokens"]
  return {**batch, "decoder_target_tokens": targets, "decoder_loss_weights": targets * 0 + 1}


@pytest.mark.slow
def test_custom_training_loop(program, tmp_path):
  axes = program.initializer.train_state_axes
  learning_rate = utils.create_learning_rate_scheduler("constant", base_learning_rate=0.1)

  def step(state, batch):
    return trainer.train_with_lr(
      state,
      batch,
      learning_rate=learning_rate(state.step),
      dropout_rng=jax.random.PRNGKey(1),
      model=program.model,
      num_microbatches=2,
      weight_metrics_computer=trainer.WeightMetricsComputer(),
    )

  partitioned = program.partitioner.partition(
    step,
    in_axis_resources=(axes, program.partitioner.data_partition_spec),
    out_axis_resources=(axes, None),
  )
  compiled = program.partitioner.compile(partitioned, program.state, _batch())
  evaluate = jax.jit(functools.partial(trainer.eval_step, program.model))
  before = evaluate(program.state, _batch())
  state, metrics = compiled(program.state, _batch())
  state, more = compiled(state, _batch())
  after = evaluate(state, _batch())
  assert int(state.step) == 2
  assert after["loss"].compute() < before["loss"].compute()
  both = trainer.merge_metrics(metrics, more)
  names = utils.flatten_dict_string_keys(state.params)
  assert all(f"weight_rms/{name}" in both for name in names)
  norm = float(metrics["weight_gradient_norm"].compute())
  accumulate = functools.partial(
    trainer.accumulate_grads_microbatched, program.model, num_microbatches=None
  )
  grads, _, mutables = jax.jit(accumulate)(program.state, _batch(), jax.random.PRNGKey(1))
  assert mutables is None
  # The gradient of the whole batch is the sum over its microbatches.
  squares = sum(float(jnp.vdot(g, g)) for g in jax.tree.leaves(grads))
  assert norm == pytest.approx(squares**0.5, rel=1e-5)


@pytest.mark.slow
def test_trainer_returns_a_future_of_training_metrics_and_evaluation_values(program):
  ours = trainer.Trainer(
    model=program.model,
    train_state=jax.tree.map(jnp.copy, program.state),  # The steps donate it.
    partitioner=program.partitioner,
    eval_names=["dev"],
    summary_dir=None,
    train_state_axes=program.initializer.train_state_axes,
    rng=jax.random.PRNGKey(1),
    learning_rate_fn=utils.create_learning_rate_scheduler("constant", base_learning_rate=0.1),
    num_microbatches=None,
  )
  trained = ours.train(iter([_batch()] * 2), 2, start_step=0).result()
  assert trained["loss_per_nonpadding_target_token"].value > 0
  values = ours.eval({"dev": iter([_batch()])})
  # It has been trained on this batch.
  assert values["dev"]["loss"].value < trained["loss"].value
  never = trainer.TerminateOnNanAction("dev")
  assert not train.run_actions(
    trainer.ActionMode.TRAIN_EVAL, {"TRAIN_EVAL": [never]}, ours.train_state, values
  )
  ours.close()


def test_checkpoints_are_saved_restored_and_read(program, tmp_path):
  manager = checkpoints.OrbaxCheckpointManagerInterface(
    str(tmp_path), program.state, program.partitioner
  )
  assert manager.save(program.state)
  manager.wait_until_finished()
  assert manager.all_steps() == [0]
  restored = manager.restore(step=0)
  manager.close()
  cfg = utils.RestoreCheckpointConfig(path=str(tmp_path), mode="latest")
  again = program.initializer.from_checkpoint([cfg])
  read = checkpoints.load_t5x_checkpoint(str(tmp_path), step=0)
  flat = state_utils.flatten_state_dict(read["target"])
  for name, value in utils.flatten_dict_string_keys(program.state.params).items():
    np.testing.assert_array_equal(np.asarray(flat[name]), value)
  for state in (restored, again):
    for a, b in zip(
      jax.tree.leaves(state.params), jax.tree.leaves(program.state.params), strict=True
    ):
      np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_predictions_and_scores_over_a_dataset(program):
  greedy = functools.partial(decoding.temperature_sample, temperature=0.0)
  model = make_model(decode_fn=greedy)
  inference = train_state.InferenceState.create(variables(model.module))
  axes = program.partitioner.get_mesh_axes(inference)
  one = {name: np.full(length, 3, np.int32) for name, length in LENGTHS.items()}
  one |= {"decoder_target_tokens": one["decoder_input_tokens"]}
  one |= {"decoder_loss_weights": np.ones(LENGTHS["decoder_input_tokens"], np.int32)}
  dataset = list(enumerate([one] * 5))
  for infer_step in (model.predict_batch, model.score_batch):
    infer = utils.get_infer_fn(
      infer_step=infer_step,
      batch_size=BATCH,
      train_state_axes=axes,
      partitioner=program.partitioner,
    )
    found = infer(dataset, inference, rng=jax.random.PRNGKey(0))
    assert [index for index, _ in found] == [0, 1, 2, 3, 4]
    assert len({str(output) for _, output in found}) == 1


def test_axes_can_be_renamed():
  own = variables(make_model().module)
  renamed = utils.override_params_axes_names(
    own,
    [("encoder/layers_0/mlp/wo/kernel", ("mlp", "own")), ("encoder/.*", ("never",) * 9)][:1],
  )
  found = renamed["params_axes"]["encoder"]["layers_0"]["mlp"]["wo"]["kernel_axes"]
  assert found.names == ("mlp", "own")
  kept = renamed["params_axes"]["encoder"]["layers_0"]["mlp"]["wi_0"]["kernel_axes"]
  assert kept.names == ("embed", "mlp")
  with pytest.raises(
    ValueError, match=r"override for decoder/.* does not match param rank \(2\): "
  ):
    utils.override_params_axes_names(own, [("decoder/layers_0/mlp/wo/kernel", ("mlp",))])
  with pytest.raises(ValueError, match="do not contain a 'params_axes' collection"):
    utils.override_params_axes_names({"params": {}})


def test_multihost_functions_and_meshes(program):
  utils.sync_global_devices("here")
  utils.multihost_assert_equal({"a": 1}, "differs")
  mesh = partitioning.get_mesh((1, 4))
  assert dict(mesh.shape) == {"data": 2, "model": 4}
  assert partitioning.bounds_from_last_device(jax.devices()[-1]) == (1, 8)
  assert partitioning.get_coords(jax.devices()[3]) == (0, 3)
  chunker = partitioning.LocalChunker(program.partitioner.mesh)
  info = chunker.get_local_chunk_info((16, 4), ("data", None))
  assert info == partitioning.LocalChunkInfo((slice(0, 16), slice(None)), 0)
  assert (chunker.get_shard_id("data"), chunker.get_replica_id("data")) == (0, 0)
  assert program.partitioner.get_local_chunk_info((16,), ("data",)).slice == (slice(0, 16),)
  assert (program.partitioner.data_shards, program.partitioner.data_shard_id) == (1, 0)


def test_sharding_constraints_do_nothing_outside_of_a_mesh(program):
  x = jnp.ones((8, 4))
  assert not partitioning.global_mesh_defined()
  assert partitioning.with_sharding_constraint(x, PartitionSpec("data")) is x
  seen = []

  def inside(x):
    seen.append(partitioning.global_mesh_defined())
    return partitioning.with_sharding_constraint(x, PartitionSpec("data"))

  split = program.partitioner.partition(inside, None, None)(x)
  assert seen == [True]
  assert split.sharding.spec == PartitionSpec("data")


def test_params_move_to_the_devices(program):
  host = jax.tree.map(np.asarray, program.state)
  moved = program.partitioner.move_params_to_devices(host, program.initializer.train_state_axes)
  for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(program.state), strict=True):
    assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def test_gin_flags_in_a_custom_program(monkeypatch, tmp_path):
  from rosetta_t5.train import train

  arguments = gin_utils.rewrite_gin_args(["run", "--gin.DROPOUT_RATE=0.1", "--x=1"])
  assert arguments == ["run", "--gin_bindings=DROPOUT_RATE = 0.1", "--x=1"]
  gin.clear_config()
  gin_utils.parse_gin_flags(
    ["."],
    ["t5x/configs/runs/pretrain.gin"],
    [
      "MODEL = None",
      f"MODEL_DIR = '{tmp_path}'",
      "TRAIN_STEPS = 3",
      "MIXTURE_OR_TASK_NAME = 'none'",
      "TASK_FEATURE_LENGTHS = {'inputs': 4, 'targets': 4}",
      "train.gc_period = 7",
    ],
    finalize_config=False,
  )
  assert gin.get_configurable(train) is not train
  assert gin.query_parameter("train.gc_period") == 7
  assert "train.gc_period = 7" in gin_utils.get_gin_config_str()
  gin_utils.summarize_gin_config(str(tmp_path), None, 0)
  assert (tmp_path / "config.gin").read_text() == gin_utils.get_gin_config_str()
  gin.clear_config()


def test_checkpoint_steps_are_found_in_order_and_once():
  steps, made, index, host = [3, 8, 10, 12], [], 0, 0
  while host < 14:
    epoch_end = min(14, host - host % 4 + 4)
    index = utils.find_first_checkpoint_step(index, steps, first_step=0, host_step=host)
    num_steps, saves = utils.find_next_checkpoint_step(
      index, epoch_end - host, False, host, steps, epoch_end, checkpoint_period=4, first_step=0
    )
    host += num_steps
    made.append((host, saves))
  assert made == [(3, True), (4, False), (8, False), (10, True), (12, False), (14, False)]
  assert utils.find_first_checkpoint_step(0, steps, first_step=8, host_step=8) == 2
  assert utils.find_first_checkpoint_step(0, [], first_step=8, host_step=8) == 0
