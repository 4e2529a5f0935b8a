"""Stretches between hooks, over many random sets of hooks."""

from __future__ import annotations

import random

import pytest

from rosetta_t5.training.hooks import Hook, run_due, stretches


def nothing(step):
  """Does nothing."""


def random_case(seed):
  """Returns first and last step, hooks and the longest stretch, some of them absent."""
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
def test_stretches_cover_every_step_once_and_end_wherever_a_hook_is_due(seed):
  first, last, hooks, longest = random_case(seed)
  found = list(stretches(first, last, hooks, longest))
  steps = [step for start, stop in found for step in range(start + 1, stop + 1)]
  assert steps == list(range(first + 1, last + 1))
  due = {step for step in steps if any(hook.is_due(step, last) for hook in hooks)}
  regular = {step for step in steps if longest and step % longest == 0}
  ends = [stop for _, stop in found]
  assert set(ends) == due | regular | ({last} if steps else set()), "and nowhere else"


@pytest.mark.parametrize("seed", range(200))
def test_a_run_that_is_resumed_anywhere_runs_the_hooks_of_one_that_is_not(seed):
  first, last, hooks, longest = random_case(seed)

  def done(start):
    ran = []
    recording = [
      Hook(hook.name, lambda step, h=hook: ran.append((step, h.name)), hook.period, hook.steps,
           hook.at_end)
      for hook in hooks
    ]  # fmt: skip
    for _, stop in stretches(start, last, recording, longest):
      run_due(recording, stop, last)
    return ran

  middle = (first + last) // 2
  assert done(middle) == [event for event in done(first) if event[0] > middle]


def test_hooks_run_in_their_order():
  ran = []
  hooks = [Hook(name, lambda step, n=name: ran.append(n), period=5) for name in "abc"]
  run_due(hooks, 4, last_step=100)
  run_due(hooks, 10, last_step=100)
  assert ran == ["a", "b", "c"]


def test_a_hook_is_due_at_its_multiples_its_steps_and_at_the_end_if_it_says_so():
  def due(**arguments):
    return [s for s in range(1, 13) if Hook("", nothing, **arguments).is_due(s, last_step=11)]

  assert due(period=4) == [4, 8, 12]
  assert due(period=4, steps=[5]) == [4, 5, 8, 12]
  assert due(period=4, at_end=True) == [4, 8, 11, 12]
  assert due(period=0) == due() == []


def test_nothing_is_left_to_do_at_the_last_step():
  assert list(stretches(7, 7, [], 3)) == []
  assert list(stretches(9, 7, [], 3)) == []
