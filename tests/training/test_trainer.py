"""The trainer: steps over batches on a mesh, merged metrics, evaluation by task."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny_models import Bigram, make_batch, make_model, make_state

from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.telemetry.metrics_manager import as_floats
from rosetta_t5.training.trainer import Trainer, merge_metrics

PARTITIONER = PjitPartitioner(num_partitions=2)
MODEL = make_model(Bigram())
BATCHES = [make_batch(8, seed=seed) for seed in range(4)]


class Norms:
  """A weight metrics computer."""

  def compute_metrics(self, gradients, old_train_state, new_train_state):
    from clu import metrics as clu_metrics

    return {"grad_max": clu_metrics.Average.from_model_output(jnp.max(gradients["table"]))}


@pytest.fixture
def make_trainer():
  made = []

  def make(learning_rate=0.05, eval_names=(), **options):
    state = make_state(Bigram())
    axes = PARTITIONER.get_mesh_axes(state)
    shardings = jax.tree.map(
      lambda spec: NamedSharding(PARTITIONER.mesh, spec),
      axes,
      is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )
    options.setdefault("num_microbatches", None)
    trainer = Trainer(
      MODEL,
      jax.device_put(jax.tree.map(jnp.copy, state), shardings),
      PARTITIONER,
      eval_names,
      None,
      axes,
      jax.random.PRNGKey(0),
      learning_rate_fn=lambda step: jnp.float32(learning_rate),
      **options,
    )
    made.append(trainer)
    return trainer

  yield make
  for trainer in made:
    trainer.close()


def loss(params, batch):
  return float(MODEL.eval_fn(jax.tree.map(jnp.asarray, params), batch)[0])


@pytest.mark.slow
def test_metrics_are_averaged_over_the_steps_and_the_state_advances(make_trainer):
  trainer = make_trainer()
  singly = make_trainer()
  together = as_floats(trainer.train(iter(BATCHES), 3).result())
  apart = [as_floats(singly.train(iter([batch]), 1).result())["loss"] for batch in BATCHES[:3]]
  assert int(trainer.train_state.step) == 3
  assert together["loss"] == pytest.approx(np.mean(apart), rel=1e-6)
  assert apart[0] == pytest.approx(loss(make_state(Bigram()).params, BATCHES[0]), rel=1e-6)
  assert together["timing/steps_per_second"] == pytest.approx(3 / together["timing/seconds"])
  assert "first_nonfinite" not in together
  assert not trainer.first_nonfinite.compute()


def test_training_ends_with_the_batches(make_trainer):
  trainer = make_trainer()
  values = as_floats(trainer.train(iter(BATCHES[:2]), 3).result())
  assert int(trainer.train_state.step) == 2
  assert values["timing/steps_per_second"] == pytest.approx(2 / values["timing/seconds"])


def test_no_batch_is_drawn_after_the_last_step(make_trainer):
  batches = iter(BATCHES)
  make_trainer().train(batches, 2).result()
  assert next(batches) is BATCHES[2]


def test_compiled_eval_step_is_shared_by_tasks_with_equal_shapes(make_trainer, monkeypatch):
  trainer, shapes = make_trainer(eval_names=["a", "b", "c"]), []
  compile_step = PARTITIONER.compile

  def compile_and_record(step, state, batch):
    shapes.append(batch["decoder_target_tokens"].shape)
    return compile_step(step, state, batch)

  monkeypatch.setattr(PARTITIONER, "compile", compile_and_record)
  trainer.compile_eval({"a": BATCHES[0], "b": BATCHES[1], "c": make_batch(16)})
  assert [shape[0] for shape in shapes] == [8, 16]


def test_state_keeps_its_sharding(make_trainer):
  trainer = make_trainer(num_microbatches=2)
  before = trainer.train_state.params["table"].sharding
  trainer.train(iter(BATCHES), 1).result()
  table = trainer.train_state.params["table"]
  assert before.is_equivalent_to(table.sharding, 2)
  assert table.addressable_shards[0].data.shape == (16, 32)


def test_microbatches_and_compiling_ahead_do_not_change_the_result(make_trainer):
  plain, ahead = make_trainer(), make_trainer(num_microbatches=2, overlapping_parts=2)
  assert ahead.num_microbatches == 4
  ahead.compile_train(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), BATCHES[0]))
  for trainer in (plain, ahead):
    trainer.train(iter(BATCHES), 2).result()
  np.testing.assert_allclose(
    plain.train_state.params["table"], ahead.train_state.params["table"], atol=1e-6
  )


def test_trainer_records_the_first_nonfinite_step(make_trainer):
  trainer = make_trainer(learning_rate=np.nan)
  trainer.train(iter(BATCHES), 3).result()
  # The first step makes the parameters NaN, so the second step is the first with a bad loss.
  assert int(trainer.first_nonfinite.step) == 1
  assert bool(trainer.first_nonfinite.compute())


def test_weight_metrics_are_among_the_values(make_trainer):
  trainer = make_trainer(weight_metrics_computer=Norms())
  assert as_floats(trainer.train(iter(BATCHES), 2).result())["grad_max"] > 0


def test_evaluation_covers_all_batches_of_each_task_and_keeps_the_state(make_trainer):
  trainer = make_trainer(eval_names=["a", "b"])
  params = jax.device_get(trainer.train_state.params)
  trainer.compile_eval({"a": BATCHES[0], "b": BATCHES[1]})
  tasks = {"a": iter(BATCHES[:3]), "b": iter(BATCHES[3:])}
  values = {task: as_floats(found) for task, found in trainer.eval(tasks).items()}
  assert values["a"]["loss"] == pytest.approx(
    np.mean([loss(params, batch) for batch in BATCHES[:3]]), rel=1e-6
  )
  assert values["b"]["loss"] == pytest.approx(loss(params, BATCHES[3]), rel=1e-6)
  np.testing.assert_array_equal(trainer.train_state.params["table"], params["table"])


def test_error_names_the_task_without_batches(make_trainer):
  trainer = make_trainer(eval_names=["empty"])
  with pytest.raises(
    ValueError, match=r"task 'empty' has no batches: .*train_eval/utils.DatasetConfig"
  ):
    trainer.eval({"empty": iter([])})


def test_metrics_merge_name_by_name():
  a, b = (dict(MODEL.eval_fn(make_state(Bigram()).params, batch)[1]) for batch in BATCHES[:2])
  merged = merge_metrics(a, b)
  assert merged.keys() == a.keys()
  assert float(merged["loss"].total) == pytest.approx(float(a["loss"].total + b["loss"].total))
