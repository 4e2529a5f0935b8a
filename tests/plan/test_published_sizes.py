"""The recorded meshes of published sizes, which are also in the recipes' headers, fit with the stated figures."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from rosetta_t5.config import run_from_command_line
from rosetta_t5.plan.configurations import USABLE
from rosetta_t5.plan.description import Plan
from rosetta_t5.plan.estimate import estimate_step
from rosetta_t5.plan.memory import StateMemory
from rosetta_t5.telemetry.gpus import GPUS

PAGE = pathlib.Path("benchmarks/results/2026-11-23-published-sizes.md")
GPU, MFU = GPUS["a100"], 0.4
QUICK = ("gpt/126m", "gpt/175b", "gpt/310_1b")
# Every run needs these, and the figures do not depend on them.
ANY_RUN = [
  "gin/runs/pretrain.gin",
  "DROPOUT_RATE=0.0",
  "TRAIN_STEPS=1",
  "MIXTURE_OR_TASK_NAME='any'",
]


def table_rows():
  """Returns the rows of the table, as lists of their cells."""
  lines = re.findall(r"^\| `(?:gpt|t5_1_1|scalable_t5)/.*\|$", PAGE.read_text(), re.MULTILINE)
  return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def recipe_of(name):
  """Returns the file whose header states the row's mesh."""
  is_example = name.startswith("t5_1_1/")
  return f"gin/examples/{name[7:]}_pile_pretrain.gin" if is_example else f"gin/models/{name}.gin"


def arguments_of(name):
  """Returns the gin files and bindings of a row's run, without those of its mesh."""
  if name.startswith("gpt/"):
    return ["gin/examples/gpt_126m_pile_pretrain.gin", recipe_of(name), "DROPOUT_RATE=0.0"]
  if name.startswith("t5_1_1/"):
    return [recipe_of(name)]
  inputs, targets = (1024, 256) if "mt5" in name else (512, 128)
  lengths = f"TASK_FEATURE_LENGTHS={{'inputs': {inputs}, 'targets': {targets}}}"
  return [recipe_of(name), *ANY_RUN, lengths]


def figures(name, gpus, batch, mesh, microbatches, policy):
  """Returns the bytes on each GPU and the sequences per second, according to `plan`."""
  network = "TransformerConfig" if name.startswith("gpt/") else "T5Config"
  bindings = [
    f"BATCH_SIZE={batch}",
    f"partitioning.PjitPartitioner.mesh={mesh}",
    "partitioning.PjitPartitioner.num_partitions=1",
    f"trainer.Trainer.num_microbatches={microbatches}",
    f"network.{network}.remat_policy='{policy}'",
    f"network.{network}.attention_kernel='flash'",
  ]
  sizes = json.loads(mesh)
  if "pipeline" in sizes:
    # As in Megatron: microbatches of one row, and activations that are split between blocks.
    rows = batch // sizes["data"] // microbatches
    bindings += [
      "partitioning.PjitPartitioner.sequence_parallel=True",
      f"partitioning.PjitPartitioner.zero1={name != 'gpt/310_1b'}",
      f"partitioning.PjitPartitioner.pipeline_microbatches={rows}",
    ]
  given = [*arguments_of(name), *bindings]
  flags = [f"--gin_file={x}" if x.endswith(".gin") else f"--gin.{x}" for x in given]
  found = []

  def describe(resolved):
    plan = Plan(resolved, GPU)
    assert not resolved.problems.messages
    memory = StateMemory.of(plan.state, plan.specs, plan.work)
    estimate = estimate_step(memory, plan.work, plan.flops, GPU, MFU)
    found.extend([sum(estimate.memory.values()), batch / estimate.step_seconds])
    return []

  argv = ["rosetta-t5 plan", "--gin.MODEL_DIR='not made'", *flags]
  run_from_command_line(None, [*argv, "--dry_run", f"--devices={gpus}"], describe)
  return found


ROWS = table_rows()


@pytest.mark.slow
@pytest.mark.parametrize(
  "row",
  [
    pytest.param(row, id=f"{row[0]}, {row[3]}", marks=[pytest.mark.slow] * is_slow)
    for row in ROWS
    for is_slow in [row[0].strip("`") not in QUICK]
  ],
)
def test_a_published_size_fits_its_mesh_with_the_stated_figures(row):
  name, gpus, batch, mesh, microbatches, policy, memory, speed, _ = (c.strip("`") for c in row)
  size, rate = figures(name, int(gpus), int(batch), mesh, int(microbatches), policy)
  assert size <= USABLE * GPU.memory
  assert (f"{size / 1e9:.1f} GB", f"{float(f'{rate:.4g}'):,g}") == (memory, speed)


def test_the_headers_of_published_sizes_state_their_meshes():
  assert len(ROWS) == 28
  # Where there are several meshes for as many GPUs, the header states the first.
  first = {(name.strip("`"), gpus): mesh.strip("`") for name, gpus, _, mesh, *_ in reversed(ROWS)}
  for (name, gpus), mesh in first.items():
    header = pathlib.Path(recipe_of(name)).read_text()
    assert f"{mesh} on {gpus}" in re.sub(r"\n# +", " ", header), name
