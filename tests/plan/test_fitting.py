"""A check proposes changes for a step that does not fit into a GPU, and with each of them it fits."""

from __future__ import annotations

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from planned_work import planned_work

from rosetta_t5.networks.config import T5Config
from rosetta_t5.parallel.placement import PipelineSettings
from rosetta_t5.plan.configurations import changes_that_fit, possible_microbatches
from rosetta_t5.plan.memory import step_memory
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
  mlp_dim=2816,
  mlp_activations=("gelu", "linear"),
)
WORK = planned_work(LARGE, {"encoder": 512, "decoder": 128}, 256, MESH)


def state(parameters: int) -> tuple[types.SimpleNamespace, types.SimpleNamespace]:
  """Returns a train state's shapes, without an optimizer, and its PartitionSpecs.

  One kernel of the layers has all of the parameters.
  """
  segments = WORK.activations.segments
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


def apply_line(line: str) -> Workload:
  """Returns WORK with the changes that a line proposes."""
  parts = re.search(r"num_microbatches = (\d+)", line)
  policy = re.search(r"network.T5Config.remat_policy = '(\w+)'", line)
  work = WORK.replace(microbatches=int(parts[1])) if parts else WORK
  return work.replace(remat_policy=policy[1]) if policy else work


def test_microbatches_leave_a_pipeline_the_examples_that_it_needs():
  pipeline = PipelineSettings(microbatches=4)
  work = WORK.replace(examples=8, mesh={"pipeline": 2, "data": 1}, pipeline=pipeline)
  assert list(possible_microbatches(work)) == [1, 2, 4]


def test_each_proposed_change_fits_and_half_its_microbatches_do_not():
  lines = changes_that_fit(*state(783_000_000), WORK)
  assert len(lines) == 3
  fewest = 256
  for line in lines:
    work = apply_line(line)
    assert sum(step_memory(*state(783_000_000), work).values()) <= 72e9
    assert work.microbatches < fewest, (
      "rematerialization costs time, so it must need fewer microbatches"
    )
    fewest = work.microbatches
    if work.microbatches > 1:
      half = work.replace(microbatches=work.microbatches // 2)
      assert sum(step_memory(*state(783_000_000), half).values()) > 72e9


def test_a_step_that_fits_gets_no_advice():
  assert not changes_that_fit(*state(783_000_000), WORK.replace(examples=8))


def test_a_state_that_is_too_large_must_be_sharded():
  (line,) = changes_that_fit(*state(12_500_000_000), WORK)
  assert line.startswith(
    "microbatches and rematerialization do not suffice: 75 GB are params, gradients. Shard them"
  )


def test_a_configured_remat_policy_is_kept():
  full = WORK.replace(config=dataclasses.replace(LARGE, remat_policy="full"))
  (line,) = changes_that_fit(*state(783_000_000), full.replace(examples=1024))
  assert re.fullmatch(r"trainer\.Trainer\.num_microbatches = \d+: about .* GB", line)


def test_unknown_networks_get_no_advice():
  unknown = WORK.replace(config=types.SimpleNamespace(), activations=None)
  assert not changes_that_fit(*state(100_000_000_000), unknown)


@pytest.mark.parametrize("examples", [125, 243, 250])
def test_proposed_microbatches_divide_the_examples_of_a_device(examples):
  lines = changes_that_fit(*state(783_000_000), WORK.replace(examples=examples))
  found = [apply_line(line).microbatches for line in lines]
  assert found[0] > 1
  assert all(examples % parts == 0 for parts in found)
