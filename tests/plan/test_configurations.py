"""`plan` ends with the fastest configurations that fit, and the flags that set them."""

from __future__ import annotations

import re
import shlex

import gin
import pytest

from rosetta_t5.cli import main
from rosetta_t5.networks.t5_config import T5Config
from rosetta_t5.plan.estimate import estimate_step
from rosetta_t5.plan.memory import Gradients, StateMemory
from rosetta_t5.plan.workload import Workload
from rosetta_t5.telemetry.gpus import GPUS

# T5 1.1 large with fewer layers, which are traced in less time.
LARGE = (
  "gin/examples/large_pile_pretrain.gin",
  *(f"--gin.network.T5Config.num_{side}_layers=4" for side in ("encoder", "decoder")),
)


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
  return flags, [float(s) for s in re.findall(r"^\d\. .*: (\S+) s, ", output, re.MULTILINE)]


def test_three_configurations_fit_where_the_recipe_does_not(capsys):
  arguments = (*LARGE, "--devices=4", "--gpu=h100")
  output = plan(capsys, *arguments)
  assert "DOES NOT FIT" in output
  flags, seconds = choices(output)
  assert len(flags) == 3
  assert max(seconds) < 1.1 * min(seconds)
  assert seconds[0] < 1.03 * min(seconds)
  assert len({row[0] for row in flags}) == 3  # on different meshes
  again = plan(capsys, *arguments, *flags[0])
  assert "H100 80 GB: fits" in again
  assert float(re.search(r"step +(\S+) s:", again)[1]) == pytest.approx(seconds[0], rel=0.01)


def test_the_precision_and_the_kernel_suit_gpu_and_rows(capsys):
  unpacked = "--gin.train/utils.DatasetConfig.pack=False"
  (first, *_), _ = choices(plan(capsys, *LARGE, "--devices=8", "--gpu=a100", unpacked))
  assert "--gin.network.T5Config.attention_kernel='cudnn'" in first
  assert not any("te_config" in flag for flag in first)
  (first, *_), _ = choices(plan(capsys, *LARGE, "--devices=8", "--gpu=h200"))
  assert "--gin.network.T5Config.attention_kernel='flash'" in first
  assert "--gin.te_helper.TransformerEngineConfig.enabled=1" in first


def test_a_state_that_fits_no_configuration_is_reported(capsys):
  output = plan(capsys, "gin/examples/xl_pile_pretrain.gin", "--devices=1", "--gpu=rtx4090")
  assert "no configuration fits 1 RTX 4090 24 GB: use more GPUs" in output


def test_rematerialization_costs_time_and_fp8_and_fused_attention_save_it():
  config = T5Config(vocab_size=32128, emb_dim=1024, mlp_dim=2816, num_heads=16, dtype="bfloat16")
  work = Workload(config, {"encoder": 512, "decoder": 128}, 32, {"data": 1}, kernel="cudnn")
  memory = StateMemory({"params": 1e9}, Gradients(0.0, 0.0, 0.0))

  def seconds(**changes):
    step = work.replace(**changes)
    return estimate_step(memory, {}, {}, step, 1e15, GPUS["h100"], 0.4).step_seconds

  plain = seconds()
  assert (
    1.0 < seconds(remat_policy="minimal") / plain < seconds(remat_policy="full") / plain < 4 / 3
  )
  assert 0.7 < seconds(fp8=True) / plain < 0.85
  assert seconds(kernel="xla") > plain
  assert seconds(microbatches=8) > plain


DELAYED_FP8 = (
  "--gin.train.te_config_cls=@te_helper.TransformerEngineConfig",
  "--gin.te_helper.TransformerEngineConfig.enabled=1",
  "--gin.te_helper.TransformerEngineConfig.recipe='delayed'",
)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (["gin/optimizers/kfac.gin"], "by_kfac cannot measure the layers of a pipeline"),
    pytest.param(
      DELAYED_FP8, "recipe = 'delayed' is not supported with a pipeline", marks=pytest.mark.slow
    ),
  ],
)
def test_plan_refuses_the_pipelines_that_a_run_refuses(changes, message, capsys):
  mesh = "--gin.partitioning.PjitPartitioner.mesh={'pipeline': 2, 'data': -1}"
  scan = "--gin.network.TransformerConfig.scan_layers=True"
  recipe = "gin/examples/gpt_126m_pile_pretrain.gin"
  with pytest.raises(SystemExit):
    plan(capsys, recipe, *changes, "--devices=8", scan, mesh)
  assert message in capsys.readouterr().err
