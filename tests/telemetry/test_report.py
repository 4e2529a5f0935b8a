"""The texts before and after a run contain everything that a reader of the log looks for."""

from __future__ import annotations

import types

import jax.numpy as jnp
import pytest

from rosetta_t5.checkpoints import SaveCheckpointConfig
from rosetta_t5.parallel import PjitPartitioner, default_mesh
from rosetta_t5.telemetry import console

PARAMS = {"a": jnp.ones((100, 20)), "b": jnp.ones(5)}


class Model:
  """A model of which the header shows the name."""

  adapter = optimizer_def = None


def setup(partitioner=None, lengths=None, save_cfg=None):
  partitioner = partitioner or types.SimpleNamespace(
    mesh=default_mesh(2), mesh_config=types.SimpleNamespace(setting=None)
  )
  cfg = types.SimpleNamespace(name="pile", batch_size=16, task_feature_lengths=lengths)
  return console.describe_setup(partitioner, cfg, save_cfg, "/runs/a").splitlines()


def description(**overrides):
  arguments = {"flops": 72.35e6, "steps": (0, 20), "base": None, "more": []}
  return console.describe_training(Model(), PARAMS, **arguments | overrides).splitlines()


def test_setup_shows_devices_data_and_output():
  save_cfg = SaveCheckpointConfig(period=10)
  assert setup(lengths={"inputs": 64, "targets": 32}, save_cfg=save_cfg) == [
    "devices   8 cpu devices, mesh data=4 model=2",
    "data      pile, batch 16: inputs 64, targets 32",
    "writes    /runs/a, checkpoints every 10 steps and at start and end",
  ]
  save_cfg = SaveCheckpointConfig(checkpoint_steps=[3, 7])
  assert (
    setup(save_cfg=save_cfg)[-1] == "writes    /runs/a, checkpoints at 3, 7 and at start and end"
  )


def test_setup_omits_lengths_and_checkpoints_that_there_are_not():
  assert setup()[1:] == ["data      pile, batch 16", "writes    /runs/a, no checkpoints"]


def test_description_shows_model_and_steps():
  assert description() == [
    "model     Model, 2,005 parameters, 0.07235 GFLOP a training sequence",
    "steps     0 to 20, from scratch",
  ]


@pytest.mark.parametrize(
  ("settings", "line"),
  [
    ({"num_partitions": 2}, "mesh data=4 model=2 (num_partitions = 2)"),
    (
      {"num_partitions": 1, "model_parallel_submesh": (2, 2)},
      "mesh data=2 model=4 (model_parallel_submesh = (2, 2))",
    ),
    (
      {"ici_mesh_shape": (2, 4), "dcn_mesh_shape": (1, 1)},
      "mesh data=2 model=4 (ici_mesh_shape = (2, 4), dcn_mesh_shape = (1, 1))",
    ),
    (
      {"num_partitions": 1, "mesh": {"fsdp": -1, "tensor": 2}},
      "mesh data=1 fsdp=4 model=2 (mesh = {'fsdp': -1, 'tensor': 2})",
    ),
  ],
)
def test_setup_shows_the_mesh_and_the_setting_that_determines_it(settings, line):
  partitioner = PjitPartitioner(**settings)
  assert setup(partitioner)[0] == f"devices   8 cpu devices, {line}"


def test_description_shows_the_restored_checkpoint_and_notes():
  lines = description(steps=(10, 20), base="/p/checkpoint_10", more=[("note", "schedule not used")])
  assert lines[1:] == [
    "steps     10 to 20, from /p/checkpoint_10",
    "note      schedule not used",
  ]


def test_a_description_omits_flops_that_are_unknown():
  assert description(flops=None)[0] == "model     Model, 2,005 parameters"


def test_summary_shows_steps_losses_checkpoint_and_metrics():
  progress = console.Progress(0, 300)
  for step, loss in ((1, 6.5), (2, 4.0), (300, 3.25)):
    progress.report(step, {"loss": loss})
  text = progress.summary(300, 95.0, "/runs/a", "/runs/a/checkpoint_300")
  assert text.splitlines() == [
    "done        step 300: 300 steps in 1m35s",
    "loss        6.500 at first, 3.250 at the end",
    "checkpoint  /runs/a/checkpoint_300",
    "metrics     tensorboard --logdir=/runs/a",
  ]


def test_summary_of_a_finished_run_says_that_nothing_was_left_to_do():
  text = console.Progress(300, 300).summary(300, 1.0, "/runs/a", None)
  assert text.splitlines() == [
    "done     step 300: nothing was left to do: set a larger TRAIN_STEPS (or TRAIN_STEPS_RELATIVE)",
    "metrics  tensorboard --logdir=/runs/a",
  ]
