"""The microbatches with which a step fits into a GPU."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from planned_work import planned_work

from rosetta_t5.networks.config import T5Config
from rosetta_t5.parallel.placement import PipelineSettings
from rosetta_t5.plan.configurations import POLICIES, fewest_microbatches, possible_microbatches
from rosetta_t5.plan.memory import StateMemory
from rosetta_t5.plan.workload import Workload
from rosetta_t5.traced.program import parameters_read

MESH = {"data": 8, "model": 1}
LARGE = T5Config(
  vocab_size=32128,
  dtype="bfloat16",
  emb_dim=1024,
  num_heads=16,
  num_encoder_layers=24,
  num_decoder_layers=24,
  scan_layers=True,
  mlp_dim=2816,
  mlp_activations=("gelu", "linear"),
)


@functools.cache
def large_work() -> Workload:
  """Returns a step of T5-large, traced only where these tests run."""
  return planned_work(LARGE, {"encoder": 512, "decoder": 128}, 256, MESH)


def state(parameters: int) -> tuple[types.SimpleNamespace, types.SimpleNamespace]:
  """Returns a train state's shapes, without an optimizer, and its PartitionSpecs.

  One kernel of the layers has all of the parameters.
  """
  segments = large_work().activations.segments
  count = 1 + max(number for part in segments for number in parameters_read(part))
  kernels = [
    number
    for value in segments[1].values
    if value.primitive == "dot_general"
    for operand in value.operands
    for number in operand.parameters
  ]
  params = [
    jax.ShapeDtypeStruct((parameters * (n in kernels[:1]),), jnp.float32) for n in range(count)
  ]
  specs = [PartitionSpec()] * count
  return types.SimpleNamespace(params=params), types.SimpleNamespace(params=specs)


def test_microbatches_leave_a_pipeline_the_examples_that_it_needs():
  pipeline = PipelineSettings(microbatches=4)
  work = large_work().replace(examples=8, mesh={"pipeline": 2, "data": 1}, pipeline=pipeline)
  assert list(possible_microbatches(work)) == [1, 2, 4]


@pytest.mark.parametrize(("policy", "examples"), [("none", 256), ("full", 1024), ("none", 243)])
def test_the_fewest_microbatches_fit_and_fewer_do_not(policy, examples):
  work = large_work().replace(examples=examples, remat_policy=policy)
  memory = StateMemory.of(*state(783_000_000), work)
  fits = fewest_microbatches(work, memory, 72e9)
  assert fits.microbatches > 1
  assert examples % fits.microbatches == 0
  assert sum(memory.step(fits).values()) <= 72e9
  fewer = max(n for n in range(1, fits.microbatches) if examples % n == 0)
  assert sum(memory.step(work.replace(microbatches=fewer)).values()) > 72e9


def test_rematerialization_needs_fewer_microbatches():
  memory = StateMemory.of(*state(783_000_000), large_work())
  options = [
    fewest_microbatches(large_work().replace(remat_policy=policy), memory, 72e9)
    for policy in POLICIES
  ]
  numbers = [option.microbatches for option in options]
  assert numbers == sorted(set(numbers), reverse=True)


def test_no_number_of_microbatches_makes_room_for_a_state_that_is_too_large():
  memory = StateMemory.of(*state(12_500_000_000), large_work())
  assert fewest_microbatches(large_work(), memory, 72e9) is None
