"""Ranges of steps between hooks, for many random sets of hooks."""

from __future__ import annotations

import dataclasses
import random

import pytest

from rosetta_t5.training.hooks import Hook, run_due_hooks, step_ranges


def nothing(step):
  """Does nothing."""


def random_case(seed):
  """Returns first and last step, hooks and the longest range; some of them are absent."""
  rng = random.Random(seed)
  first = rng.randrange(50)
  last = first + rng.randrange(60)
  hooks = [
    Hook(
      f"hook {number}",
      nothing,
      period=rng.choice([None, 0, rng.randrange(1, 20)]),
      steps=rng.sample(range(120), rng.randrange(3)),
      at_end=rng.random() < 0.5,
    )
    for number in range(rng.randrange(4))
  ]
  return first, last, hooks, rng.choice([None, rng.randrange(1, 20)])


@pytest.mark.parametrize("seed", range(200))
def test_ranges_cover_every_step_once_and_end_wherever_a_hook_is_due(seed):
  first, last, hooks, longest = random_case(seed)
  found = list(step_ranges(first, last, hooks, longest))
  steps = [step for start, stop in found for step in range(start + 1, stop + 1)]
  assert steps == list(range(first + 1, last + 1))
  due = {step for step in steps if any(hook.is_due(step, last) for hook in hooks)}
  regular = {step for step in steps if longest and step % longest == 0}
  ends = [stop for _, stop in found]
  assert set(ends) == due | regular | ({last} if steps else set()), "and nowhere else"


@pytest.mark.parametrize("seed", range(200))
def test_resumed_run_runs_the_same_hooks_as_an_uninterrupted_run(seed):
  first, last, hooks, longest = random_case(seed)

  def done(start):
    ran = []
    recording = [
      dataclasses.replace(hook, run=lambda step, h=hook: ran.append((step, h.name)))
      for hook in hooks
    ]
    for _, stop in step_ranges(start, last, recording, longest):
      run_due_hooks(recording, stop, last)
    return ran

  middle = (first + last) // 2
  assert done(middle) == [event for event in done(first) if event[0] > middle]


def test_hooks_run_in_their_order():
  ran = []
  hooks = [Hook(name, lambda step, n=name: ran.append(n), period=5) for name in "abc"]
  run_due_hooks(hooks, 4, last_step=100)
  run_due_hooks(hooks, 10, last_step=100)
  assert ran == ["a", "b", "c"]


def test_hook_is_due_at_its_period_at_its_steps_and_optionally_at_the_end():
  def due(**arguments):
    return [s for s in range(1, 13) if Hook("", nothing, **arguments).is_due(s, last_step=11)]

  assert due(period=4) == [4, 8, 12]
  assert due(period=4, steps=[5]) == [4, 5, 8, 12]
  assert due(period=4, at_end=True) == [4, 8, 11, 12]
  assert due(period=0) == due() == []


def test_no_ranges_are_left_at_the_last_step():
  assert list(step_ranges(7, 7, [], 3)) == []
  assert list(step_ranges(9, 7, [], 3)) == []
