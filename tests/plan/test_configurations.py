"""`plan` ends with the fastest configurations that fit, and the flags that set them."""

from __future__ import annotations

import re
import shlex
import types

import gin
import jax.numpy as jnp
import pytest
from planned_work import planned_work
from tiny_models import DECODER_ONLY, make_decoder_only_model

from rosetta_t5.cli import main
from rosetta_t5.networks.config import T5Config
from rosetta_t5.plan.estimate import estimate_step
from rosetta_t5.plan.memory import StateMemory
from rosetta_t5.plan.workload import fastest_kernel
from rosetta_t5.telemetry.gpus import GPUS

# T5 1.1 large with fewer layers, which are traced in less time.
LARGE = (
  "gin/examples/large_pile_pretrain.gin",
  *(f"--gin.network.T5Config.num_{side}_layers=2" for side in ("encoder", "decoder")),
)


XLA = "--gin.network.T5Config.attention_kernel='xla'"
UNPACKED = "--gin.train/utils.DatasetConfig.pack=False"


def plan(capsys, *arguments):
  try:
    main(["plan", *arguments])
  finally:
    gin.clear_config()
  return capsys.readouterr().out


def choices(output):
  """Returns the flags and the seconds of each configuration."""
  rows = output[output.index("choices") :].replace("\\\n", " ").splitlines()
  flags = [shlex.split(row) for row in rows if row.strip().startswith("--gin.")]
  times = re.findall(r"^\d\. .*: (\S+) (m?s), ", output, re.MULTILINE)
  return flags, [_seconds(*time) for time in times]


def _seconds(number, unit):
  return float(number) / (1000 if unit == "ms" else 1)


@pytest.mark.slow
def test_three_configurations_fit_where_the_recipe_does_not(capsys):
  arguments = (*LARGE, "--gin.BATCH_SIZE=4096", "--devices=4", "--gpu=h100", XLA)
  output = plan(capsys, *arguments)
  assert "DOES NOT FIT" in output
  flags, seconds = choices(output)
  assert len(flags) == len(seconds) == 3
  assert seconds == sorted(seconds)
  assert len({row[0] for row in flags}) == 3  # on different meshes
  again = plan(capsys, *arguments, *flags[0])
  assert "H100 80 GB: fits" in again
  found = re.search(r"step +(\S+) (m?s):", again)
  assert _seconds(*found.groups()) == pytest.approx(seconds[0], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("gpu", "rows", "kernel"), [("a100", [UNPACKED], "cudnn"), ("h200", [], "flash")]
)
def test_the_kernel_suits_the_gpu_and_the_rows(gpu, rows, kernel, capsys):
  (first, *_), _ = choices(plan(capsys, *LARGE, "--devices=8", f"--gpu={gpu}", *rows, XLA))
  assert f"--gin.network.T5Config.attention_kernel='{kernel}'" in first


@pytest.mark.slow
def test_the_precision_of_the_recipe_is_kept_unless_another_one_is_allowed(capsys):
  output = plan(capsys, *LARGE, "--devices=8", "--gpu=h200")
  assert "te_config" not in output
  with_fp8 = plan(capsys, *LARGE, "--devices=8", "--gpu=h200", "--precision=any")
  assert "in fp8: " in with_fp8
  (first, *_), _ = choices(with_fp8)
  assert "--gin.te_helper.TransformerEngineConfig.enabled=1" in first
  bfloat16 = plan(capsys, *LARGE, "--devices=8", "--gpu=a100", "--precision=any")
  assert "te_config" not in bfloat16  # an A100 has no fp8


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "kernel"), [([], "flash"), ([UNPACKED], "cudnn")])
def test_the_kernel_auto_counts_as_the_one_that_a_run_would_choose(rows, kernel, capsys):
  named = f"--gin.network.T5Config.attention_kernel='{kernel}'"
  auto, same, xla = (
    re.search(r"memory +(.*)", plan(capsys, *LARGE, "--devices=8", *rows, *flag))[1]
    for flag in ([], [named], [XLA])
  )
  assert auto == same != xla


@pytest.mark.parametrize(
  ("changes", "kernel"),
  [
    ({}, "cudnn"),
    ({"window": 4, "layer_pattern": ("global", "local")}, "flash"),
    ({"attention_softcap": 30.0}, "flash"),
    ({"dtype": jnp.float32}, "flash"),
  ],
)
def test_the_expected_kernel_is_one_that_computes_all_layers(changes, kernel):
  config = DECODER_ONLY.replace(**({"dtype": jnp.bfloat16, "head_dim": 8} | changes))
  cfg = types.SimpleNamespace(pack=False, task_feature_lengths=None)
  model = make_decoder_only_model(config)
  assert fastest_kernel(model, {"decoder": 16}, cfg, {"data": 1}, GPUS["h100"]) == kernel
  prefix_lm = make_decoder_only_model(config, inputs_bidirectional_attention=True)
  assert fastest_kernel(prefix_lm, {"decoder": 16}, cfg, {"data": 1}, GPUS["h100"]) == "xla"


@pytest.mark.slow
def test_rows_that_the_task_has_packed_need_the_flash_kernel(capsys):
  recipe = "gin/examples/base_c4_pretrain_prefix_lm.gin"
  few_layers = [f"--gin.network.T5Config.num_{side}_layers=1" for side in ("encoder", "decoder")]
  output = plan(capsys, recipe, *few_layers, "--devices=8", XLA)
  assert "attention_kernel=\"'flash'\"" in output
  lengths = "--gin.TASK_FEATURE_LENGTHS={'inputs': 626, 'targets': 626}"
  same_lengths = plan(capsys, recipe, *few_layers, "--devices=8", XLA, lengths)
  assert re.search("FLOPs .*", output)[0] == re.search("FLOPs .*", same_lengths)[0]


def test_a_state_that_fits_no_configuration_is_reported(capsys):
  wide = "--gin.network.T5Config.mlp_dim=1_000_000"
  output = plan(capsys, *LARGE, wide, "--devices=1", "--gpu=rtx4090")
  assert "no configuration fits 1 RTX 4090 24 GB: use more GPUs" in output


@pytest.mark.slow
def test_rematerialization_costs_time_and_fp8_and_fused_attention_save_it():
  config = T5Config(vocab_size=32128, emb_dim=1024, mlp_dim=2816, num_heads=16, dtype="bfloat16")
  work = planned_work(config, {"encoder": 512, "decoder": 128}, 32, {"data": 1}, kernel="cudnn")
  memory = StateMemory({"params": 1e9}, 1e9, [0.0] * len(work.activations.segments))

  def seconds(**changes):
    step = work.replace(**changes)
    return estimate_step(memory, step, 1e15, GPUS["h100"], 0.4).step_seconds

  plain = seconds()
  assert (
    1.0 < seconds(remat_policy="minimal") / plain < seconds(remat_policy="full") / plain < 4 / 3
  )
  assert 0.7 < seconds(fp8=True) / plain < 0.85
  assert seconds(kernel="xla") > plain
  assert seconds(microbatches=8) > plain
