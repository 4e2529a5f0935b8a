"""`rosetta-t5 plan`: what a step needs on GPUs that need not be installed."""

from __future__ import annotations

import re

import gin
import pytest
from planned_work import activation_bytes, planned_work

from rosetta_t5.cli import main
from rosetta_t5.networks.config import T5Config, TransformerConfig
from rosetta_t5.parallel import PjitPartitioner, standard_logical_axis_rules
from rosetta_t5.plan.collectives import Collective, step_collectives
from rosetta_t5.plan.estimate import estimate_step, members_per_node, seconds_on_links
from rosetta_t5.plan.memory import StateMemory
from rosetta_t5.telemetry.gpus import GPUS

RECIPE = "gin/examples/tiny_pile_pretrain.gin"
LENGTHS = {"encoder": 512, "decoder": 128}
ONE_LAYER = TransformerConfig(vocab_size=1024, num_layers=1, logits_via_embedding=True)


def plan(capsys, *arguments, recipe=RECIPE):
  """Returns the exit status and the output of `rosetta-t5 plan`."""
  try:
    status = main(["plan", recipe, *arguments])
  except SystemExit as ended:
    status = ended.code
  finally:
    gin.clear_config()
  shown = capsys.readouterr()
  return status, shown.out + shown.err


@pytest.mark.slow
def test_a_plan_has_memory_time_and_traffic(capsys):
  status, output = plan(capsys, "--devices=16", "--mfu=0.5", "--gin.BATCH_SIZE=64")
  assert status == 0
  assert "mesh           data 16 × model 1 on 16 devices" in output
  assert re.search(r"memory +\S+ [MG]B of 80 GB on each H100 80 GB: fits", output)
  assert re.search(r"step +\S+ m?s: \S+ m?s at an MFU of 0.5, \S+ m?s waiting for links", output)
  assert re.search(
    r"sends +\S+ MB  all-reduce of gradients over data, by the network: \S+ ms", output
  )


@pytest.mark.slow
def test_the_mesh_determines_the_collectives(capsys):
  mesh = '--gin.partitioning.PjitPartitioner.mesh={"fsdp": 4, "tensor": 2}'
  status, output = plan(capsys, "--devices=8", "--gpu=a100", "--gin.BATCH_SIZE=64", mesh)
  assert status == 0
  for what in (
    "all-gather of parameters over fsdp, by NVLink",
    "reduce-scatter of gradients over fsdp, by NVLink",
    "all-reduce of activations over model, by NVLink",
  ):
    assert what in output


@pytest.mark.slow
def test_a_plan_of_experts_has_their_all_to_alls_and_meshes_with_their_axis(capsys):
  recipe = "gin/examples/quickstart_experts.gin"
  mesh = '--gin.partitioning.PjitPartitioner.mesh={"expert": 4}'
  status, output = plan(capsys, "--gin.BATCH_SIZE=64", "--devices=8", mesh, recipe=recipe)
  assert status == 0
  assert "mesh           data 2 × expert 4 × fsdp 1 × model 1" in output
  assert "all-to-all of activations over expert, by NVLink" in output
  assert "all-reduce of gradients over data, expert, by NVLink" in output
  assert re.search(r"--gin.partitioning.PjitPartitioner.mesh='.*\"expert\": [1248]", output)


@pytest.mark.slow
def test_heads_that_cannot_be_sharded_are_reported(capsys):
  recipe = "gin/examples/gpt_126m_pile_pretrain.gin"
  tensor = "--gin.partitioning.PjitPartitioner.num_partitions=8"
  status, output = plan(capsys, "--devices=8", tensor, recipe=recipe)
  assert status == 0
  assert "12 heads are not divisible by 8 (model): each device computes all of them" in output


@pytest.mark.one_quick_variant
@pytest.mark.parametrize(
  ("arguments", "text"),
  [
    (
      ("--devices=8", "--gpu=h20"),
      "argument --gpu: invalid choice: 'h20' (choose from",
    ),
    (("--devices=8", "--mfu=40"), "--mfu must be a share of a GPU's peak such as 0.4, got 40.0"),
    (("--devices=0",), "--devices: must be a positive integer, got '0'"),
    (
      ("--devices=8", '--gin.partitioning.PjitPartitioner.mesh={"fsdp": 3}'),
      "mesh = {'fsdp': 3} needs a multiple of 3 devices, but there are 8: set sizes",
    ),
    (
      (
        *("--devices=8", "--gin.partitioning.PjitPartitioner.num_partitions=8"),
        "--gin.network.T5Config.num_heads=6",
      ),
      "cannot be split over model into 8 parts",
    ),
    (("--devices=7",), "batch size 8 cannot be split over the 7 devices"),
  ],
)
def test_impossible_plans_are_refused(capsys, arguments, text):
  status, output = plan(capsys, *arguments)
  assert status in (1, 2)
  assert text in output


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
def test_neighboring_devices_share_a_node(axes, mesh, members):
  assert members_per_node(axes, mesh) == members


def test_a_group_uses_nvlink_within_a_node_and_all_its_network_cards_between_nodes():
  gpu = GPUS["h100"]
  assert seconds_on_links(450e9, ("model",), {"data": 2, "model": 8}, gpu) == (1.0, False)
  assert seconds_on_links(50e9, ("data",), {"data": 2, "model": 8}, gpu) == (1.0, True)
  assert seconds_on_links(400e9, ("data",), {"data": 64, "model": 1}, gpu) == (1.0, True)


def test_a_ring_sends_twice_for_an_all_reduce_and_once_for_an_all_gather():
  mesh = {"data": 4}
  assert Collective("all-reduce", ("data",), 100.0, "").wire_bytes(mesh) == 150
  assert Collective("all-gather", ("data",), 100.0, "").wire_bytes(mesh) == 75


def test_lookups_and_tied_logits_share_one_gradient_in_float32():
  sizes = []
  for rows in (1024, 2048):
    config = ONE_LAYER.replace(vocab_size=rows, dtype="bfloat16")
    sent = step_collectives(planned_work(config, {"decoder": 128}, 32, {"data": 8}))
    sizes.append(sum(each.size for each in sent if each.why == "gradients"))
  assert sizes[1] - sizes[0] == 1024 * config.emb_dim * 4


def test_a_step_in_float32_is_computed_at_the_rate_of_tf32():
  seconds = []
  for dtype in ("bfloat16", "float32"):
    config = ONE_LAYER.replace(dtype=dtype)
    work = planned_work(config, {"decoder": 128}, 32, {"data": 1}, kernel="flash")
    memory = StateMemory({"params": 0.0}, 0.0, [0.0] * len(work.activations.segments))
    seconds.append(estimate_step(memory, work, 1e15, GPUS["h100"], 0.4).compute_seconds)
  assert seconds[1] == pytest.approx(seconds[0] * 989 / 495)


@pytest.mark.slow
def test_rematerialization_and_chunks_of_the_loss_keep_less():
  config = T5Config(
    vocab_size=32128,
    emb_dim=1024,
    num_heads=16,
    head_dim=64,
    mlp_dim=2816,
    num_encoder_layers=6,
    num_decoder_layers=6,
    dtype="bfloat16",
  )
  work = planned_work(config, LENGTHS, 32, {"data": 1})
  kept = [
    activation_bytes(work.replace(remat_policy=policy))
    for policy in ("none", "dots_saveable", "minimal", "full")
  ]
  assert kept == sorted(kept, reverse=True)
  assert kept[0] > 5 * kept[3]
  chunked = activation_bytes(planned_work(config, LENGTHS, 32, {"data": 1}, loss_chunk_length=16))
  # Without the logits, the gradients of the first layer of the backward pass decide.
  assert 0.5 < (kept[0] - chunked) / (32 * 128 * 32128 * 2 * 4) < 1


@pytest.mark.slow
@pytest.mark.parametrize(
  ("kernel", "stored"), [("xla", 2), ("auto", 2), ("cudnn", 0), ("flash", 0)]
)
def test_only_attention_by_xla_stores_logits_and_probabilities(kernel, stored):
  config = T5Config(vocab_size=32128, num_decoder_layers=0, dtype="bfloat16")
  work = planned_work(config, LENGTHS, 32, {"data": 1}, kernel=kernel)
  fused = activation_bytes(work.replace(kernel="cudnn"))
  pairs = activation_bytes(work) - fused
  assert pairs == pytest.approx(stored * 6 * 32 * 8 * 512 * 512 * 2, rel=0.01)


@pytest.mark.one_quick_variant
@pytest.mark.parametrize(
  "changes",
  [{"merged_attention": True, "positions": "rotary"}, {"encoder": {"global_block_size": 16}}],
)
def test_a_plan_of_attention_that_only_xla_computes_stores_logits_whatever_the_kernel(changes):
  config = T5Config(vocab_size=128, num_encoder_layers=1, num_decoder_layers=1, **changes)
  work = planned_work(config, LENGTHS, 32, {"data": 1}, kernel="flash")
  assert not work.is_attention_fused


@pytest.mark.slow
def test_activations_sharded_over_model_between_blocks_need_less_memory():
  layers = {"num_encoder_layers": 2, "num_decoder_layers": 2}
  width = {"emb_dim": 1024, "num_heads": 16, "mlp_dim": 2816}
  config = T5Config(vocab_size=32128, dtype="bfloat16", **width, **layers)

  def work(devices, split):
    mesh = {"data": 1, "model": devices}
    rules = standard_logical_axis_rules(2 if split == "embed" else 1, 1)
    partitioner = PjitPartitioner(
      num_partitions=1, logical_axis_rules=rules, sequence_parallel=split == "length"
    )
    return planned_work(config, LENGTHS, 32, mesh, partitioner)

  split, alone = ([work(n, how) for how in (None, "length", "embed")] for n in (8, 1))
  for policy in ("none", "minimal", "full"):
    whole, by_position, by_width = (activation_bytes(x.replace(remat_policy=policy)) for x in split)
    assert by_position < 0.8 * whole
    assert by_position <= by_width <= whole
    assert len({activation_bytes(x.replace(remat_policy=policy)) for x in alone}) == 1


@pytest.mark.slow
def test_sequence_parallelism_lowers_the_planned_memory(capsys):
  mesh = '--gin.partitioning.PjitPartitioner.mesh={"tensor": 4}'
  switch = "--gin.partitioning.PjitPartitioner.sequence_parallel=True"
  outputs = [
    plan(capsys, "--devices=8", "--gin.BATCH_SIZE=64", mesh, *more)[1] for more in ([], [switch])
  ]
  activations = [re.search(r"(\S+ [MG]B) +activations", text)[1] for text in outputs]
  assert activations[0] != activations[1]
