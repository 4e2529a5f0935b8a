"""`rosetta-t5 compile` where XLA's GPU compiler is not installed, and with wrong arguments."""

from __future__ import annotations

import importlib.util

import jax
import pytest

from rosetta_t5.cli import main
from rosetta_t5.config import run_from_command_line
from rosetta_t5.config.language.allow_list import limited_to_list
from rosetta_t5.gpu_program.compile_command import lower_step
from rosetta_t5.plan.description import Plan
from rosetta_t5.telemetry.gpus import GPUS

RECIPE = "gin/examples/small_pile_pretrain.gin"
TINY = "gin/examples/tiny_pile_pretrain.gin"


@pytest.mark.skipif(
  importlib.util.find_spec("jax_cuda13_plugin") is not None, reason="the compiler is installed here"
)
def test_a_missing_compiler_is_one_sentence_with_what_to_install(capsys):
  with pytest.raises(SystemExit):
    main(["compile", RECIPE, "--devices", "8"])
  error = capsys.readouterr().err
  assert "XLA's GPU compiler is not installed in this environment" in error
  assert "pip install 'rosetta-t5[gpu]'" in error


@pytest.mark.parametrize(
  ("arguments", "text"),
  [
    (["--devices", "0"], "--devices: must be a positive integer, got '0'"),
    (["--devices", "8", "--gpu", "v100"], "argument --gpu: invalid choice: 'v100'"),
    (["--devices", "8", "--step", "tain"], "argument --step: invalid choice: 'tain'"),
    (
      ["--devices", "8", "--hlo", "nowhere/x.txt"],
      "--hlo: nowhere/x.txt must be a file in a folder",
    ),
    (["--devices", "8", "--json", "."], "--json: . must be a file in a folder that exists"),
    (
      ["--devices", "8", "--mesh", "fsdp=8"],
      "argument --mesh: must be JSON such as '{\"fsdp\": 8}'",
    ),
    ([], "the following arguments are required: --devices"),
  ],
)
def test_wrong_arguments_are_errors_before_anything_compiles(arguments, text, capsys):
  with pytest.raises(SystemExit) as ended:
    main(["compile", RECIPE, *arguments])
  assert ended.value.code == 2
  assert text in capsys.readouterr().err


@pytest.mark.slow
def test_the_step_of_a_file_from_elsewhere_is_lowered_with_the_trainer_that_it_names():
  lowered = []

  def describe(resolved):
    devices = jax.devices()[:1]
    partitioner = resolved.arguments["partitioner"].on_devices(devices)
    resolved.arguments["partitioner"] = partitioner
    with jax.set_mesh(partitioner.mesh):
      lowered.append(lower_step(Plan(resolved), "train", GPUS["h200"])[0])
    return []

  argv = ["rosetta-t5 compile", f"--gin_file={TINY}", "--gin.MODEL_DIR='not made'"]
  argv += [f"--gin.network.T5Config.num_{side}_layers=1" for side in ("encoder", "decoder")]
  argv += ["--gin.trainer.Trainer.num_microbatches=2", "--dry_run", "--devices=1"]
  with limited_to_list():
    run_from_command_line(None, argv, describe)
  # The loop over microbatches shows that the trainer has the file's arguments.
  assert "stablehlo.while" in lowered[0].as_text()
