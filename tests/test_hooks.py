"""The steps at which training stops for hooks, for many random sets of hooks."""

from __future__ import annotations

import dataclasses
import random

import pytest

from rosetta_t5.train_loop import Hook, run_due_hooks, stopping_steps


def nothing(step):
  """Does nothing."""


def random_case(seed):
  """Returns first and last step, hooks and the longest time without a stop; some are absent."""
  rng = random.Random(seed)
  first = rng.randrange(50)
  last = first + rng.randrange(60)
  hooks = [
    Hook(
      nothing,
      period=rng.choice([None, 0, rng.randrange(1, 20)]),
      steps=rng.sample(range(120), rng.randrange(3)),
      at_end=rng.random() < 0.5,
    )
    for _ in range(rng.randrange(4))
  ]
  return first, last, hooks, rng.choice([None, rng.randrange(1, 20)])


@pytest.mark.parametrize("seed", range(200))
def test_training_stops_where_a_hook_is_due_and_nowhere_else(seed):
  first, last, hooks, longest = random_case(seed)
  found = list(stopping_steps(first, last, hooks, longest))
  assert found == sorted(set(found)), "in order, each once"
  steps = range(first + 1, last + 1)
  due = {step for step in steps if any(hook.is_due(step, last) for hook in hooks)}
  regular = {step for step in steps if longest and step % longest == 0}
  assert set(found) == due | regular | ({last} if steps else set()), "and nowhere else"


@pytest.mark.parametrize("seed", range(200))
def test_resumed_run_runs_the_same_hooks_as_an_uninterrupted_run(seed):
  first, last, hooks, longest = random_case(seed)

  def done(start):
    ran = []
    recording = [
      dataclasses.replace(hook, run=lambda step, n=number: ran.append((step, n)))
      for number, hook in enumerate(hooks)
    ]
    for stop in stopping_steps(start, last, recording, longest):
      run_due_hooks(recording, stop, last)
    return ran

  middle = (first + last) // 2
  assert done(middle) == [event for event in done(first) if event[0] > middle]


def test_hooks_run_in_their_order():
  ran = []
  hooks = [Hook(lambda step, n=name: ran.append(n), period=5) for name in "abc"]
  run_due_hooks(hooks, 4, last_step=100)
  run_due_hooks(hooks, 10, last_step=100)
  assert ran == ["a", "b", "c"]


def test_hook_is_due_at_its_period_at_its_steps_and_optionally_at_the_end():
  def due(**arguments):
    return [s for s in range(1, 13) if Hook(nothing, **arguments).is_due(s, last_step=11)]

  assert due(period=4) == [4, 8, 12]
  assert due(period=4, steps=[5]) == [4, 5, 8, 12]
  assert due(period=4, at_end=True) == [4, 8, 11, 12]
  assert due(period=0) == due() == []


def test_no_stop_is_left_at_the_last_step():
  assert list(stopping_steps(7, 7, [], 3)) == []
  assert list(stopping_steps(9, 7, [], 3)) == []
