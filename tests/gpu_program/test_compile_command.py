"""The programs that XLA compiles for GPUs are as good as those recorded beside this file.

RECORD=1 make test-gpu-program rewrites the record, to be committed with the change that explains it.
"""

from __future__ import annotations

import collections
import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from rosetta_t5.plan.collectives import Collective

HERE = pathlib.Path(__file__).parent
RECORD = HERE / "recorded.json"
RECIPE = "gin/examples/small_pile_pretrain.gin"
DATASET = "--gin.train/utils.DatasetConfig"
FP8 = [
  "--gin.train.te_config_cls=@te_helper.TransformerEngineConfig",
  "--gin.te_helper.TransformerEngineConfig.enabled=1",
]
UNPACKED = [f"{DATASET}.pack=False"]
# Two layers on each side, one of which has eight experts, for one of eight devices each.
EXPERTS = [
  "--gin.TRAIN_STEPS=1",
  "--gin.DROPOUT_RATE=0.0",
  "--gin.MIXTURE_OR_TASK_NAME='any'",
  "--gin.TASK_FEATURE_LENGTHS={'inputs': 512, 'targets': 128}",
  "--gin.network.T5Config.num_encoder_layers=2",
  "--gin.network.T5Config.num_decoder_layers=2",
  "--gin.train.partitioner=@partitioning.PjitPartitioner()",
  '--mesh={"expert": 8}',
]

pytestmark = [
  pytest.mark.gpu_program,
  pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="XLA's GPU compiler is not installed: make test-gpu-program",
  ),
]


def kernel(name: str) -> list[str]:
  return [f"--gin.network.T5Config.attention_kernel='{name}'"]


# Name → (GPU, devices, arguments, what the program must contain).
CASES = {
  "h200 xla": ("h200", 1, kernel("xla"), ["matmuls (cuBLASLt)"]),
  "h200 cudnn": ("h200", 1, [*kernel("cudnn"), *UNPACKED], ["cuDNN attention"]),
  "h200 auto packed": ("h200", 1, kernel("auto"), ["Triton kernels"]),
  "h200 fp8": ("h200", 1, [*kernel("cudnn"), *UNPACKED, *FP8], ["fp8 matmuls (cuBLASLt)"]),
  "a100 xla": ("a100", 1, kernel("xla"), ["matmuls (cuBLASLt)"]),
  "a100 cudnn": ("a100", 1, [*kernel("cudnn"), *UNPACKED], ["cuDNN attention"]),
  "a100 flash packed": ("a100", 1, kernel("flash"), ["Triton kernels"]),
  # XLA overlaps collectives on A100 only if a flag of the launch scripts asks for it.
  "a100 fsdp": ("a100", 8, [*kernel("flash"), '--mesh={"fsdp": 8}'], ["Triton kernels"]),
  "h200 fsdp": ("h200", 8, [*kernel("flash"), '--mesh={"fsdp": 8}'], ["Triton kernels"]),
  "h200 tensor fp8": (
    "h200",
    8,
    [*kernel("cudnn"), *UNPACKED, *FP8, '--mesh={"data": 4, "tensor": 2}'],
    ["fp8 matmuls (cuBLASLt)", "cuDNN attention"],
  ),
  "h100 experts": (
    "h100",
    8,
    [*kernel("cudnn"), *UNPACKED, *EXPERTS],
    ["cuDNN attention"],
  ),
}
RECIPES = {"h100 experts": ["gin/models/moe/switch_base_8.gin", "gin/runs/moe/pretrain.gin"]}


@functools.cache
def compiled(case: str, folder: pathlib.Path) -> dict:
  """Returns what `rosetta-t5 compile --json` writes for a case."""
  gpu, devices, arguments, _ = CASES[case]
  file = folder / f"{case.replace(' ', '_')}.json"
  command = [sys.executable, "-m", "rosetta_t5.cli", "compile", *RECIPES.get(case, [RECIPE])]
  command += [
    f"--gpu={gpu}",
    f"--devices={devices}",
    f"--json={file}",
    f"{DATASET}.batch_size={64 * devices}",
  ]
  done = subprocess.run(
    [*command, *arguments], capture_output=True, text=True, check=False, cwd=HERE.parents[1]
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return json.loads(file.read_text())


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
  return functools.partial(compiled, folder=tmp_path_factory.mktemp("programs"))


def figures(result: dict) -> dict:
  """Returns the figures of a program that are recorded."""
  kinds = {kind: int(row["count"]) for kind, row in result["kernels_by_kind"].items()}
  collectives: collections.Counter[str] = collections.Counter()
  for each in result["collectives"]:
    collectives[f"{each['kind']} over {' '.join(each['axes'])}"] += each["count"]
  seconds = sum(each["count"] * each["seconds"] for each in result["collectives"])
  exposed = sum(each["count"] * each["exposed_seconds"] for each in result["collectives"])
  return {
    "temporaries": result["memory"]["temporaries"],
    "bytes moved": sum(row["bytes"] for row in result["kernels_by_kind"].values()),
    "kernels": kinds,
    "collectives": dict(collectives),
    "share of communication that is hidden": round(1 - exposed / seconds, 3) if seconds else 1.0,
    "least step in ms": round(result["least_step_seconds"] * 1e3, 3),
  }


@pytest.mark.parametrize("case", CASES)
def test_program_is_as_good_as_the_recorded_one(case, programs):
  found = figures(programs(case))
  key = f"{case}, jax {'.'.join(jax.__version__.split('.')[:2])}"
  recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
  if os.environ.get("RECORD"):
    RECORD.write_text(json.dumps({**recorded, key: found}, indent=1, sort_keys=True) + "\n")
    return
  if key not in recorded:
    pytest.skip(f"no record for {key}")
  expected = recorded[key]
  for name in ("temporaries", "bytes moved", "least step in ms"):
    assert found[name] <= 1.03 * expected[name], f"{name} of {case} grew: RECORD=1 accepts this"
  kernels, recorded_kernels = (sum(each["kernels"].values()) for each in (found, expected))
  assert kernels <= 1.03 * recorded_kernels, f"{case} has more kernels: RECORD=1 accepts this"
  assert found["collectives"] == expected["collectives"]
  name = "share of communication that is hidden"
  assert found[name] >= expected[name] - 0.03


@pytest.mark.parametrize("case", CASES)
def test_program_contains_the_kernels_that_were_requested(case, programs):
  result = programs(case)
  for kind in CASES[case][3]:
    assert result["kernels_by_kind"].get(kind, {}).get("count"), result["kernels_by_kind"].keys()
  if "auto" in case:
    assert "attention by flash (auto, as `plan` expects" in result["computes"]


def test_in_fp8_norms_write_their_results_only_in_fp8(programs):
  """The kernel that normalizes rows finds their maxima, so nothing needs the rows in bfloat16."""
  sources = {each["source"] for each in programs("h200 fp8")["kernels"]}
  assert "forward encoder/layers/mlp/wi_0/reduce" in sources
  assert not [each for each in sources if each.startswith("forward ") and "/pre_" in each]


def test_fsdp_scatters_gradients_once_and_gathers_parameters_at_most_twice(programs):
  """Each in bfloat16 or float32; XLA decides where it converts."""
  result = programs("h200 fsdp")
  parameters = 4 * 76_961_152
  sent: collections.Counter[str] = collections.Counter()
  for each in result["collectives"]:
    sent[each["kind"]] += each["count"] * each["sent"]
  once = Collective("all-gather", ("fsdp",), parameters, "parameters").wire_bytes({"fsdp": 8})
  scattered = sent["reduce-scatter"] + sent["all-reduce"] / 2
  assert 0.5 * once <= scattered <= 1.02 * once
  assert sent["all-gather"] <= 2 * once


def test_layers_with_experts_exchange_their_slots_four_times(programs):
  """Tokens are sent to the experts and back, forward and backward, in bfloat16."""
  exchanges = [
    each for each in programs("h100 experts")["collectives"] if each["kind"] == "all-to-all"
  ]
  assert sum(each["count"] for each in exchanges) == 2 * 4
  slots = 64 * 1.25 * (512 + 128)  # of the encoder's layer and the decoder's, with 64 examples
  sent = sum(each["count"] * each["sent"] for each in exchanges)
  assert sent == 4 * slots * 768 * 2 * 7 / 8


def test_a_mesh_that_the_partitioner_does_not_use_is_refused_before_anything_is_compiled():
  command = [sys.executable, "-m", "rosetta_t5.cli", "compile", *RECIPES["h100 experts"]]
  arguments = [each for each in EXPERTS if "partitioner" not in each]
  command += ["--devices=8", "--gin.BATCH_SIZE=64", *arguments]
  done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE.parents[1])
  assert done.returncode != 0
  assert "--mesh sets arguments of partitioning.PjitPartitioner, which this run does" in done.stderr


def test_the_benchmark_tabulates_a_program(tmp_path):
  command = [sys.executable, "-m", "benchmarks.gpu_programs", f"--results={tmp_path}"]
  done = subprocess.run(
    [*command, "--rows", "small"], capture_output=True, text=True, check=False, cwd=HERE.parents[1]
  )
  assert done.returncode == 0, done.stderr
  assert "| small, 1 H200 141 GB, batch 256 |" in done.stdout


def test_a_node_that_is_not_full_is_refused():
  command = [sys.executable, "-m", "rosetta_t5.cli", "compile", RECIPE, "--devices=12"]
  done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE.parents[1])
  assert done.returncode != 0
  assert "--devices must be at most 8 (one node), or a multiple of 8, got 12" in done.stderr
