"""What users' code reads of T5X's trainer: its metrics manager, its clock, its compiled steps."""

from __future__ import annotations

import os
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import Bigram, make_batch, make_model, make_state

from t5x import metrics, models, partitioning, trainer


def make_trainer(model=None, eval_names=(), **options):
  state = make_state(Bigram())
  partitioner = partitioning.PjitPartitioner(num_partitions=1)
  return trainer.Trainer(
    model or make_model(Bigram()),
    state,
    partitioner,
    eval_names=eval_names,
    summary_dir=None,
    train_state_axes=partitioner.get_mesh_axes(state),
    rng=jax.random.PRNGKey(0),
    learning_rate_fn=lambda step: jnp.float32(0.1),
    num_microbatches=None,
    **options,
  )


def test_the_manager_names_its_folder_and_measures_with_the_clock_of_a_test(tmp_path):
  manager = trainer.MetricsManager("eval", summary_dir=str(tmp_path))
  assert manager.summary_dir == os.path.join(tmp_path, "eval")
  with mock.patch("t5x.trainer._time", side_effect=[3.0, 7.0]):
    manager.start_duration_timer(block_on=jnp.ones(1))
    summary = manager.write_metrics_summary({"time": metrics.Time()}, step=4, num_steps=2)
    assert summary.result()["time"].value == 4.0
  manager.close()


def test_the_time_of_each_compilation_is_written():
  ours = make_trainer(eval_names=["a", "b"])
  managers = [mock.Mock() for _ in range(3)]
  ours.train_metrics_manager, ours.eval_metrics_managers = (
    managers[0],
    dict(zip("ab", managers[1:], strict=True)),
  )
  with mock.patch("t5x.trainer._time", side_effect=[0, 2, 10, 14, 20, 21]):
    ours.compile_train(make_batch(8))
    ours.compile_eval(dict.fromkeys("ab", make_batch(8)))
  seconds = [manager.write_scalar.call_args.args for manager in managers]
  assert seconds == [("timing/compilation_seconds", n, 0) for n in (2, 4, 1)]
  assert ours._compiled_eval_steps["a"] is ours._compiled_eval_steps["b"]


def test_a_partitioner_may_return_a_jitted_function():
  class Plain(partitioning.PjitPartitioner):
    def partition(self, fn, *args, **kwargs):
      return jax.jit(fn)

  partitioner = Plain(num_partitions=1)
  compiled = partitioner.compile(partitioner.partition(jnp.sin, None, None), jnp.ones(3))
  np.testing.assert_allclose(compiled(jnp.zeros(3)), 0)


def test_eval_fn_gets_the_mutable_collections_of_the_state():
  def eval_fn(params, batch, flax_mutables):
    loss = jnp.sum(flax_mutables["scale"] * batch["x"])
    return loss, {"loss": metrics.Sum(loss)}

  state = types.SimpleNamespace(params={}, flax_mutables={"scale": 3.0})
  found = trainer.eval_step(types.SimpleNamespace(eval_fn=eval_fn), state, {"x": jnp.ones(2)})
  assert float(found["loss"].compute()) == 6.0


def test_a_trainer_takes_its_steps_with_a_users_replacement_of_a_function_of_t5x():
  def accumulate(model, train_state, batch, rng, num_microbatches, data_partition_spec):
    assert isinstance(model, models.EncoderDecoderModel)
    return jax.tree.map(jnp.zeros_like, train_state.params), {"mine": metrics.Sum(1.0)}, None

  ours = make_trainer()
  before = np.asarray(ours.train_state.params["table"])
  with mock.patch("t5x.trainer.accumulate_grads_microbatched", accumulate):
    written = ours.train(iter([make_batch(8)] * 2), 2, start_step=0).result()
  assert written["mine"].value == 2.0
  assert written["timing/uptime"].value > 0
  np.testing.assert_array_equal(ours.train_state.params["table"], before)
  trained = make_trainer()
  trained.train(iter([make_batch(8)]), 1, start_step=0).result()
  assert not np.array_equal(trained.train_state.params["table"], before)


def test_overlapping_parts_are_refused_beside_a_users_function_which_computes_one_part_at_a_time():
  ours = make_trainer(overlapping_parts=2)
  with (
    mock.patch("t5x.trainer.accumulate_grads_microbatched"),
    pytest.raises(ValueError, match="overlapping_parts must be 1 where functions of t5x"),
  ):
    ours.train(iter([make_batch(8)]), 1, start_step=0)
