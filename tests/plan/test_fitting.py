"""What a check advises where a step is larger than a GPU: each line, followed, fits."""

from __future__ import annotations

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from rosetta_t5.networks.t5_config import T5Config
from rosetta_t5.plan.collectives import Work
from rosetta_t5.plan.estimate import step_memory
from rosetta_t5.plan.fitting import advice

MESH = {"data": 8, "model": 1}
LARGE = T5Config(
  vocab_size=32128, dtype="bfloat16", emb_dim=1024, num_heads=16, num_encoder_layers=24,
  num_decoder_layers=24, mlp_dim=2816, mlp_activations=("gelu", "linear"),
)  # fmt: skip
WORK = Work(LARGE, {"encoder": 512, "decoder": 128}, examples=256)


def state(parameters: int) -> tuple[types.SimpleNamespace, types.SimpleNamespace]:
  """Returns a train state's shapes, without an optimizer, and how it is split."""
  params = {"kernel": jax.ShapeDtypeStruct((parameters,), jnp.float32)}
  splits = {"kernel": PartitionSpec()}
  return types.SimpleNamespace(params=params), types.SimpleNamespace(params=splits)


def followed(line: str) -> tuple[Work, dict[str, str]]:
  parts = re.search(r"num_microbatches = (\d+)", line)
  policy = re.search(r"network.T5Config.remat_policy = '(\w+)'", line)
  work = dataclasses.replace(WORK, microbatches=int(parts[1])) if parts else WORK
  return work, {"remat_policy": policy[1]} if policy else {}


def test_every_advice_fits_and_half_of_it_does_not():
  lines = advice(*state(783_000_000), MESH, WORK)
  assert len(lines) == 3
  fewest = 256
  for line in lines:
    work, changes = followed(line)
    assert sum(step_memory(*state(783_000_000), MESH, work, **changes).values()) <= 72e9
    assert work.microbatches < fewest, "remat costs time: it comes with fewer microbatches"
    fewest = work.microbatches
    if work.microbatches > 1:
      half = dataclasses.replace(work, microbatches=work.microbatches // 2)
      assert sum(step_memory(*state(783_000_000), MESH, half, **changes).values()) > 72e9


def test_what_fits_gets_no_advice():
  assert not advice(*state(783_000_000), MESH, dataclasses.replace(WORK, examples=8))


def test_a_state_that_is_too_large_is_to_be_split():
  (line,) = advice(*state(11_000_000_000), MESH, WORK)
  assert line.startswith("not by microbatches or remat: 88 GB are params, gradients. Split them")


def test_remat_that_is_chosen_stays():
  full = dataclasses.replace(WORK, config=dataclasses.replace(LARGE, remat_policy="full"))
  (line,) = advice(*state(783_000_000), MESH, dataclasses.replace(full, examples=1024))
  assert re.fullmatch(r"trainer\.Trainer\.num_microbatches = \d+: about .* GB", line)


def test_networks_without_a_known_size_get_no_advice():
  unknown = dataclasses.replace(WORK, config=types.SimpleNamespace())
  assert not advice(*state(100_000_000_000), MESH, unknown)


@pytest.mark.parametrize("examples", [125, 243, 250])
def test_microbatches_divide_the_examples_of_a_device(examples):
  lines = advice(*state(783_000_000), MESH, dataclasses.replace(WORK, examples=examples))
  found = [followed(line)[0].microbatches for line in lines]
  assert found[0] > 1
  assert all(examples % parts == 0 for parts in found)
