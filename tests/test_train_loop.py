"""The training loop with a trainer, data and evaluations that do nothing."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import signal
import time
import types

import optax
import pytest

from rosetta_t5.checkpoints import SaveCheckpointConfig
from rosetta_t5.distributed import RunInterrupted, until_interrupted
from rosetta_t5.train_loop import TrainLoop
from rosetta_t5.training.actions import ActionMode
from rosetta_t5.training.optimizers.optimizer_def import OptimizerDef


class Feed:
  """Yields numbers in place of batches."""

  element_spec = ()

  def __init__(self, numbers):
    self.numbers = iter(numbers)

  def __iter__(self):
    return self

  def __next__(self):
    return next(self.numbers)

  def measures(self):
    return {}

  def close(self):
    pass


class Trainer:
  """Records the batches of each range of steps, and calls `after_batch` with each batch."""

  first_nonfinite = None
  stop_training = False

  def __init__(self, after_batch=lambda batch: None):
    self.ranges, self.after_batch = [], after_batch
    self.train_state = types.SimpleNamespace(step=0)
    self.train_metrics_manager = types.SimpleNamespace(
      write_scalar=lambda *args: None, write_scalars=lambda *args: None
    )

  def train(self, batch_iter, num_steps, start_step):
    batches = []
    for batch in itertools.islice(batch_iter, num_steps):
      batches.append(batch)
      self.after_batch(batch)
    self.ranges.append(batches)
    self.train_state.step += len(batches)
    return types.SimpleNamespace(result=dict)

  def close(self):
    pass


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)


def make_loop(trainer, numbers, total_steps=10, save_cfg=None, eval_period=5, stats_period=4):
  """Returns a loop from step 0 that evaluates nothing and saves nothing."""
  model = types.SimpleNamespace(loss_normalizing_factor=None, optimizer_def=OptimizerDef(None))
  return TrainLoop(
    model=model,
    trainer=trainer,
    train_state_axes=None,
    feed=Feed(numbers),
    evaluation=types.SimpleNamespace(cfg=None, run=lambda trainer: {}),
    predictions=types.SimpleNamespace(
      cfg=None, run=lambda *args: None, collect=lambda: None, close=lambda: None
    ),
    concurrent_metrics=True,
    manager=None,
    actions=None,
    measure_run=lambda step, values, state: {},
    model_dir="run",
    first_step=0,
    total_steps=total_steps,
    run_started=0.0,
    save_cfg=save_cfg,
    eval_period=eval_period,
    stats_period=stats_period,
  )


def run(loop):
  loop.run()
  return loop.finish()


def test_actions_get_losses_as_values_of_clu_as_in_t5x():
  seen = []
  loop = make_loop(Trainer(), itertools.count(), total_steps=5)
  loop.evaluation.cfg = "data"
  loop.evaluation.run = lambda trainer: {"task": {"loss": 2.0}}
  action = types.SimpleNamespace(run=lambda state, values: seen.append(values))
  loop.actions = {ActionMode.TRAIN_EVAL: [action]}
  run(loop)
  assert [values["task"]["loss"].value for values in seen] == [2.0]


def test_loop_trains_in_ranges_between_reports_and_evaluations():
  trainer = Trainer()
  steps, _ = run(make_loop(trainer, itertools.count()))
  assert steps == 10
  assert trainer.ranges == [[0, 1, 2, 3], [4], [5, 6, 7], [8, 9]]


@pytest.mark.parametrize(
  ("steps", "eval_period", "reports"), [(300, 1000, 20), (300, 0, 20), (3, 1000, 3), (300, 5, 60)]
)
def test_without_a_period_a_short_run_still_reports_20_times(steps, eval_period, reports):
  trainer = Trainer()
  run(make_loop(trainer, itertools.count(), steps, eval_period=eval_period, stats_period=None))
  assert len(trainer.ranges) == reports


@pytest.mark.parametrize(
  ("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGINT, 130)]
)
def test_signal_ends_the_loop_after_the_current_step_and_no_further_batch_is_drawn(
  sent, status, capsys
):
  def send_signal(batch):
    if batch == 5:
      os.kill(os.getpid(), sent)
      time.sleep(0.5)  # Ctrl-C is handled in another thread.

  pathlib.Path("run").mkdir()
  before = signal.getsignal(sent)
  trainer = Trainer(send_signal)
  loop = make_loop(trainer, itertools.count())
  with pytest.raises(RunInterrupted) as interrupted:
    run(loop)
  assert (interrupted.value.step, interrupted.value.code) == (6, status)
  assert signal.getsignal(sent) == before
  output = capsys.readouterr()
  assert "interrupted  after step 6: no checkpoint was saved" in output.out
  assert ("Press it again to end at once" in output.err) == (sent == signal.SIGINT)
  assert trainer.ranges[-1] == [5]
  assert next(loop.feed) == 6
  end = json.loads(pathlib.Path("run/run-log.jsonl").read_text())
  assert (end["event"], end["step"], end["reason"]) == ("end", 6, "interrupted")


def test_signal_ends_the_loop_also_with_a_trainer_that_expects_a_batch_for_each_step():
  class T5xTrainer(Trainer):
    def train(self, batch_iter, num_steps, start_step):
      for _ in range(num_steps):
        self.after_batch(next(batch_iter))
        self.train_state.step += 1
      return types.SimpleNamespace(result=dict)

  trainer = T5xTrainer(lambda batch: batch == 5 and os.kill(os.getpid(), signal.SIGUSR1))
  with pytest.raises(RunInterrupted) as interrupted:
    run(make_loop(trainer, itertools.count()))
  assert interrupted.value.step == trainer.train_state.step == 6


def test_ctrl_c_during_an_evaluation_ends_the_evaluation_and_the_run():
  def evaluate(trainer):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.5)
    list(until_interrupted([1, 2]))
    raise AssertionError("the evaluation was not ended")

  loop = make_loop(Trainer(), itertools.count())
  loop.evaluation.run = evaluate
  with pytest.raises(RunInterrupted) as interrupted:
    run(loop)
  assert (interrupted.value.step, interrupted.value.code) == (5, 130)


def test_trainer_can_end_the_run():
  trainer = Trainer(lambda batch: setattr(trainer, "stop_training", batch == 4))
  assert run(make_loop(trainer, itertools.count()))[0] == 5


def test_data_that_ends_before_the_run_is_an_error():
  with pytest.raises(
    ValueError, match=r"training data ended after step 7 of 10: train.get_dataset_fn must return"
  ):
    run(make_loop(Trainer(), range(7)))


class Manager:
  """Has the checkpoints of some steps."""

  def __init__(self, steps):
    self.steps, self.restored = steps, []

  def all_steps(self):
    return self.steps

  def latest_step(self):
    return self.steps[-1]

  def wait_until_finished(self):
    pass

  close = wait_until_finished

  def save(self, state):
    pass

  def restore(self, step, restore_dataset):
    assert not restore_dataset
    self.restored.append(step)
    return skipping_state(step, in_a_row=0)


def skipping_state(step, in_a_row):
  """Returns a state after some skipped steps."""
  counts = optax.ApplyIfFiniteState(in_a_row, in_a_row == 0, in_a_row, ())
  state = types.SimpleNamespace(step=step, param_states=counts)
  state.replace = lambda **fields: types.SimpleNamespace(**{**vars(state), **fields})
  return state


def skipping_loop(saved, skipped_from, ends=True):
  """Returns a loop whose optimizer skips all steps from a step on, until the state is restored if it
  `ends` then.
  """

  def after_batch(batch):
    state = trainer.train_state
    if not (ends and loop.manager.restored) and batch >= skipped_from:
      state.param_states = skipping_state(
        0, int(state.param_states.notfinite_count) + 1
      ).param_states

  trainer = Trainer(after_batch)
  trainer.train_state = skipping_state(0, 0)
  loop = make_loop(trainer, itertools.count())
  loop.model.optimizer_def.max_skipped_steps = 2
  loop.manager = Manager(saved)
  return loop


def test_after_too_many_skipped_steps_the_checkpoint_before_them_is_restored(capsys):
  pathlib.Path("run").mkdir()
  loop = skipping_loop(saved=[0, 2, 4], skipped_from=2)  # skips the steps after step 2
  steps, _ = run(loop)
  assert loop.manager.restored == [2]  # not 4, which was saved after a skipped step
  assert steps == 10
  assert loop.trainer.ranges == [[0, 1, 2, 3], [4], [5, 6, 7], [8, 9]]  # no data is repeated
  assert loop.trainer.train_state.param_states.total_notfinite == 2  # the skipped steps still count
  assert "continues with the parameters of step 2" in capsys.readouterr().out


def test_a_run_that_still_skips_after_its_restorations_ends_although_it_saves_between_them():
  pathlib.Path("run").mkdir()
  loop = skipping_loop(saved=[0, 2], skipped_from=2, ends=False)
  loop.manager.save = lambda state: loop.manager.steps.append(state.step)
  loop.save_cfg = SaveCheckpointConfig(period=2)
  with pytest.raises(ValueError, match=r"skipped the last .* from step 2 3 times .*max_norm"):
    run(loop)
  assert loop.manager.restored == [2, 4, 6]


def test_error_says_that_there_is_no_checkpoint_before_the_skipped_steps():
  with pytest.raises(ValueError, match=r"skipped the last 3 steps, up to step 4.*no checkpoint"):
    run(skipping_loop(saved=[4], skipped_from=1))
