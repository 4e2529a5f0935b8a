"""`rosetta-t5 plan`: what a step needs on GPUs that are not here."""

from __future__ import annotations

import re

import gin
import pytest

from rosetta_t5.cli import main
from rosetta_t5.networks.t5_config import T5Config
from rosetta_t5.plan.collectives import Collective
from rosetta_t5.plan.hardware import GPUS, members_in_a_node, seconds_on_links
from rosetta_t5.plan.memory import activation_bytes

RECIPE = "gin/examples/tiny_pile_pretrain.gin"
LENGTHS = {"encoder": 512, "decoder": 128}


def plan(capsys, *arguments, recipe=RECIPE):
  """Returns the exit status and all that `rosetta-t5 plan` says."""
  try:
    status = main(["plan", recipe, *arguments])
  except SystemExit as ended:
    status = ended.code
  finally:
    gin.clear_config()
  shown = capsys.readouterr()
  return status, shown.out + shown.err


def test_a_recipe_is_told_in_memory_time_and_traffic(capsys):
  status, said = plan(capsys, "--devices=16", "--mfu=0.5", "--gin.BATCH_SIZE=64")
  assert status == 0
  assert "mesh           data 16 × model 1 on 16 devices" in said
  assert re.search(r"memory +\S+ [MG]B of 80 GB on each H100 80 GB: fits", said)
  assert re.search(r"step +\S+ s: \S+ s at an MFU of 0.5, \S+ s waiting for links", said)
  assert re.search(
    r"sends +\S+ MB  all-reduce of gradients over data, by the network: \S+ ms", said
  )


def test_a_mesh_by_counts_changes_what_is_sent(capsys):
  mesh = '--gin.partitioning.PjitPartitioner.mesh={"fsdp": 4, "tensor": 2}'
  status, said = plan(capsys, "--devices=8", "--gpu=a100", "--gin.BATCH_SIZE=64", mesh)
  assert status == 0
  for what in (
    "all-gather of parameters over fsdp, by NVLink",
    "reduce-scatter of gradients over fsdp, by NVLink",
    "all-reduce of activations over model, by NVLink",
  ):
    assert what in said


def test_heads_that_a_mesh_cannot_split_are_told(capsys):
  recipe = "gin/examples/gpt_126m_pile_pretrain.gin"
  tensor = "--gin.partitioning.PjitPartitioner.num_partitions=8"
  status, said = plan(capsys, "--devices=8", tensor, recipe=recipe)
  assert status == 0
  assert "12 heads do not go into model 8: each device computes all of them (1, 2, 3, 4, 6" in said


@pytest.mark.parametrize(
  ("arguments", "text"),
  [
    (
      ("--devices=8", "--gpu=h20"),
      "--gpu=h20 is not known (did you mean h200?): it is one of h100,",
    ),
    (("--devices=8", "--mfu=40"), "--mfu=40.0 is no share of a GPU's peak: give 0.4, say"),
    (("--devices=0",), "--devices=0: give a number from 1 on"),
    (
      ("--devices=8", '--gin.partitioning.PjitPartitioner.mesh={"fsdp": 3}'),
      "mesh = {'fsdp': 3} needs a multiple of 3 devices, but there are 8. Possible would be",
    ),
    (
      (
        *("--devices=8", "--gin.partitioning.PjitPartitioner.num_partitions=8"),
        "--gin.network.T5Config.num_heads=6",
      ),
      "cannot be split over model in 8 parts: ",
    ),
    (("--devices=7",), "batch size 8 cannot be split over the 7 devices"),
  ],
)
def test_what_cannot_be_is_refused(capsys, arguments, text):
  status, said = plan(capsys, *arguments)
  assert status in (1, 2)
  assert text in said


@pytest.mark.parametrize(
  ("axes", "mesh", "members"),
  [
    (("data",), {"data": 64, "model": 1}, 8),
    (("data",), {"data": 32, "model": 2}, 4),
    (("model",), {"data": 32, "model": 2}, 2),
    (("fsdp",), {"data": 4, "fsdp": 4, "model": 8}, 1),
    (("model",), {"data": 2, "model": 16}, 8),
    (("data", "fsdp"), {"data": 2, "fsdp": 4, "model": 1}, 8),
  ],
)
def test_neighbours_share_a_node(axes, mesh, members):
  assert members_in_a_node(axes, mesh) == members


def test_links_are_nvlink_within_a_node_and_all_cards_of_a_group_between_nodes():
  gpu = GPUS["h100"]
  assert seconds_on_links(360e9, ("model",), {"data": 2, "model": 8}, gpu) == (1.0, False)
  assert seconds_on_links(40e9, ("data",), {"data": 2, "model": 8}, gpu) == (1.0, True)
  assert seconds_on_links(320e9, ("data",), {"data": 64, "model": 1}, gpu) == (1.0, True)


def test_a_ring_sends_twice_for_a_sum_and_once_for_a_gather():
  mesh = {"data": 4}
  assert Collective("all-reduce", ("data",), 100.0, "").wire_bytes(mesh) == 150
  assert Collective("all-gather", ("data",), 100.0, "").wire_bytes(mesh) == 75


def test_remat_keeps_less_and_chunks_of_the_loss_too():
  config = T5Config(
    vocab_size=32128,
    emb_dim=1024,
    num_heads=16,
    head_dim=64,
    mlp_dim=2816,
    num_encoder_layers=24,
    num_decoder_layers=24,
    dtype="bfloat16",
  )
  kept = [
    activation_bytes(config, LENGTHS, 32, 1, policy)
    for policy in ("none", "dots_saveable", "minimal", "full")
  ]
  assert kept == sorted(kept, reverse=True)
  assert kept[0] > 5 * kept[3]
  logits = 32 * 128 * 32128 * 2 * 4
  chunked = activation_bytes(config, LENGTHS, 32, 1, "full", loss_chunk_length=16)
  assert kept[3] - chunked == pytest.approx(logits * 7 / 8)


@pytest.mark.parametrize("policy", ["none", "minimal", "full"])
def test_activations_that_are_split_over_tensor_between_blocks_take_less_room(policy):
  config = T5Config(vocab_size=32128, emb_dim=1024, num_heads=16, dtype="bfloat16", mlp_dim=2816)

  def kept(devices, over_model):
    return activation_bytes(config, LENGTHS, 32, devices, policy, over_model=over_model)

  whole, by_position, by_width = (kept(8, split) for split in (None, "length", "embed"))
  assert by_position < 0.8 * whole
  # XLA keeps the whole of what it has gathered along the width, unless layers are made again: the temporaries
  # of a step compiled for CPU devices say so.
  assert (by_width == whole) is (policy == "none")
  assert by_position <= by_width <= whole
  assert len({kept(1, split) for split in (None, "length", "embed")}) == 1


def test_a_recipe_with_positions_over_tensor_is_told_with_less_memory(capsys):
  mesh = '--gin.partitioning.PjitPartitioner.mesh={"tensor": 4}'
  switch = "--gin.partitioning.PjitPartitioner.sequence_parallel=True"
  told = [
    plan(capsys, "--devices=8", "--gin.BATCH_SIZE=64", mesh, *more)[1] for more in ([], [switch])
  ]
  activations = [re.search(r"(\S+ [MG]B) +activations", text)[1] for text in told]
  assert activations[0] != activations[1]
