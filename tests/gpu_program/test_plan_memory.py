"""`plan` knows memory and traffic of a step within 10% of what XLA's GPU compiler reports, without compiling."""

from __future__ import annotations

import functools
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile

import pytest

from rosetta_t5.config import run_from_command_line
from rosetta_t5.plan.collectives import step_collectives
from rosetta_t5.plan.description import Plan
from rosetta_t5.plan.memory import StateMemory

ROOT = pathlib.Path(__file__).parents[2]
SMALL, BASE, XL = (f"gin/examples/{size}_pile_pretrain.gin" for size in ("small", "base", "xl"))
SCANNED = "gin/examples/scalable_t5/wmt19_ende_from_scratch.gin"
SCANNED_XL = "gin/models/scalable_t5/t5_1_1/xl.gin"
FP8 = (
  "--gin.train.te_config_cls=@te_helper.TransformerEngineConfig",
  "--gin.te_helper.TransformerEngineConfig.enabled=1",
)

pytestmark = [
  pytest.mark.gpu_program,
  pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="XLA's GPU compiler is not installed: make test-gpu-program",
  ),
]


def network(**fields: object) -> list[str]:
  return [f"--gin.network.T5Config.{name}={value!r}" for name, value in fields.items()]


def examples(batch_size: int) -> list[str]:
  return [f"--gin.BATCH_SIZE={batch_size}", "--gin.train/utils.DatasetConfig.pack=False"]


def mesh(**sizes: int) -> list[str]:
  return [f"--gin.partitioning.PjitPartitioner.mesh={json.dumps(sizes)}"]


GPT = "gin/examples/gpt_126m_pile_pretrain.gin"
# The layers are a scan, so that 24 of them compile as fast as three.
STACKED = ["--gin.network.TransformerConfig.scan_layers=True", "--gin.BATCH_SIZE=64"]
SIZE = {"emb_dim": 2304, "num_heads": 24, "head_dim": 96, "mlp_dim": 9216, "num_layers": 24}


PREFIX_LM = "gin/examples/base_c4_pretrain_prefix_lm.gin"


def decoder(**fields: object) -> list[str]:
  return [f"--gin.network.TransformerConfig.{name}={value!r}" for name, value in fields.items()]


# Three layers on each side compile in half a minute.
SHALLOW = network(num_encoder_layers=3, num_decoder_layers=3)
CUDNN = network(attention_kernel="cudnn")
XLA = network(attention_kernel="xla")
FUSED = [*SHALLOW, *CUDNN, *examples(64)]
ON_EIGHT = [*SHALLOW, *CUDNN, *network(num_heads=8), *examples(512)]

# What a model's file needs to be a run.
PRETRAINED = [
  "--gin_file=gin/runs/pretrain.gin",
  "--gin.TRAIN_STEPS=1",
  "--gin.DROPOUT_RATE=0.0",
  "--gin.MIXTURE_OR_TASK_NAME='any'",
  "--gin.TASK_FEATURE_LENGTHS={'inputs': 512, 'targets': 128}",
  "--gin.partitioning.PjitPartitioner.num_partitions=1",
  *network(attention_kernel="flash"),
]

T5GEMMA, T5_1_0, MT5 = (
  f"gin/models/{name}.gin" for name in ("t5gemma/2b_2b", "t5_1_0/base", "mt5/base")
)
BFLOAT16 = network(dtype="bfloat16")
# Name → (recipe, devices, arguments); the bytes of their collectives are compared too.
TRAFFIC_CASES = {
  "two tables, fsdp": (
    T5GEMMA,
    8,
    [
      *PRETRAINED,
      "--gin.TASK_FEATURE_LENGTHS={'inputs': 1024, 'targets': 1024}",
      *examples(64),
      *BFLOAT16,
      *network(num_encoder_layers=2, num_decoder_layers=2),
      *mesh(fsdp=8),
    ],
  ),
  "one table, fsdp": (
    T5_1_0,
    8,
    [*PRETRAINED, *examples(128), *BFLOAT16, *SHALLOW, *mesh(fsdp=8)],
  ),
  "one table, data": (
    T5_1_0,
    8,
    [*PRETRAINED, *examples(128), *BFLOAT16, *SHALLOW, *mesh(data=8)],
  ),
  "chunked loss, fsdp, microbatches": (
    MT5,
    8,
    [
      *PRETRAINED,
      *examples(256),
      *BFLOAT16,
      *SHALLOW,
      *mesh(fsdp=8),
      "--gin.models.EncoderDecoderModel.loss_chunk_length=16",
      "--gin.trainer.Trainer.num_microbatches=4",
    ],
  ),
}
# Name → (recipe, devices, arguments).
CASES = {
  "small, xla": (SMALL, 1, [*XLA, *examples(128)]),
  "small, cudnn": (SMALL, 1, [*CUDNN, *examples(128)]),
  "small, flash, packed": (SMALL, 1, [*network(attention_kernel="flash"), "--gin.BATCH_SIZE=128"]),
  "base, auto": (BASE, 4, [*SHALLOW, *examples(256), *mesh(data=4)]),
  "gpt, packed, auto": (GPT, 8, [*decoder(num_layers=3), "--gin.BATCH_SIZE=64"]),
  "rows packed by the task, auto": (PREFIX_LM, 8, SHALLOW),
  "base, fp8": (BASE, 1, [*FUSED, *FP8]),
  "base, matmuls kept": (BASE, 1, [*FUSED, *network(remat_policy="minimal")]),
  "base, rematerialized": (BASE, 1, [*FUSED, *network(remat_policy="full")]),
  "base, chunked loss": (
    BASE,
    1,
    [*FUSED, "--gin.models.EncoderDecoderModel.loss_chunk_length=16"],
  ),
  "base, microbatches": (BASE, 1, [*FUSED, "--gin.trainer.Trainer.num_microbatches=4"]),
  "base, data and tensor": (BASE, 8, [*ON_EIGHT, *mesh(data=2, tensor=4)]),
  "base, sequence": (
    BASE,
    8,
    [*ON_EIGHT, *mesh(tensor=4), "--gin.partitioning.PjitPartitioner.sequence_parallel=True"],
  ),
  "base, zero1": (
    BASE,
    8,
    [*ON_EIGHT, *mesh(data=8), "--gin.partitioning.PjitPartitioner.zero1=True"],
  ),
  "base, fsdp and tensor": (BASE, 8, [*ON_EIGHT, *mesh(fsdp=4, tensor=2)]),
  "xl, fsdp": (XL, 8, [*SHALLOW, *CUDNN, *examples(64), *mesh(fsdp=8)]),
  "xl, fsdp and tensor, matmuls kept": (
    XL,
    8,
    [
      *SHALLOW,
      *CUDNN,
      *examples(64),
      *mesh(fsdp=4, tensor=2),
      *network(remat_policy="minimal"),
    ],
  ),
  "scanned base": (SCANNED, 8, XLA),
  "scanned xl": (SCANNED_XL, 8, [*PRETRAINED, *examples(256), *mesh(data=8)]),
  "scanned xl, matmuls kept, microbatches": (
    SCANNED_XL,
    8,
    [
      *PRETRAINED,
      *examples(256),
      *mesh(data=8),
      *network(remat_policy="minimal"),
      "--gin.trainer.Trainer.num_microbatches=2",
    ],
  ),
  "pipeline, fsdp": (
    GPT,
    8,
    [
      *STACKED,
      *decoder(**SIZE, attention_kernel="xla", remat_policy="full"),
      *mesh(pipeline=4, fsdp=2),
    ],
  ),
  "pipeline in rounds": (
    GPT,
    8,
    [
      *STACKED,
      *decoder(**SIZE, attention_kernel="flash", remat_policy="full"),
      *mesh(pipeline=4, data=2),
      "--gin.partitioning.PjitPartitioner.pipeline_rounds=2",
    ],
  ),
  "pipeline, context": (
    GPT,
    8,
    [
      *STACKED,
      *decoder(attention_kernel="flash", remat_policy="full"),
      *mesh(pipeline=2, data=2, context=2),
    ],
  ),
  "context": (
    GPT,
    8,
    [
      *STACKED,
      *decoder(attention_kernel="flash", remat_policy="minimal"),
      *mesh(data=2, context=4),
    ],
  ),
  "pipeline of an encoder-decoder": (
    SCANNED,
    8,
    [*network(attention_kernel="flash", remat_policy="full"), *mesh(pipeline=2, data=4)],
  ),
  **TRAFFIC_CASES,
}


@functools.cache
def compiled(case: str) -> dict:
  """Returns what `rosetta-t5 compile --json` writes for a case."""
  recipe, devices, arguments = CASES[case]
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / "program.json"
    command = [sys.executable, "-m", "rosetta_t5.cli", "compile", recipe, "--gpu=h200"]
    command += [f"--devices={devices}", f"--json={file}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


@pytest.mark.parametrize("case", CASES)
def test_plan_knows_the_memory_of_a_compiled_step_within_ten_percent(case):
  parts = compiled(case)["memory"]
  total = parts["arguments"] + parts["temporaries"] + parts["outputs"]
  planned, _ = planned_step(*CASES[case])
  assert sum(planned.values()) == pytest.approx(total, rel=0.1), planned


@pytest.mark.parametrize("case", TRAFFIC_CASES)
def test_plan_knows_the_bytes_that_a_compiled_step_sends_within_ten_percent(case):
  sent = sum(each["count"] * each["sent"] for each in compiled(case)["collectives"])
  _, planned = planned_step(*CASES[case])
  assert planned == pytest.approx(sent, rel=0.1)


def planned_step(recipe: str, devices: int, arguments: list[str]) -> tuple[dict[str, float], float]:
  """Returns what `plan` computes per device: the bytes of memory by part, and those of collectives."""
  found: dict[str, float] = {}
  sent = []

  def describe(resolved):
    plan = Plan(resolved)
    found.update(StateMemory.of(plan.state, plan.specs, plan.work).step(plan.work))
    sent.extend(each.wire_bytes(plan.mesh) for each in step_collectives(plan.work))
    return []

  argv = ["rosetta-t5 plan", f"--gin_file={recipe}", "--gin.MODEL_DIR='not made'", *arguments]
  run_from_command_line(None, [*argv, "--dry_run", f"--devices={devices}"], describe)
  return found, sum(sent)
