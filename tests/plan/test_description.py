"""A dry run describes a training run and refuses impossible ones, without running a step."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from tiny_models import Bigram, make_model

from rosetta_t5 import terminal
from rosetta_t5.plan import memory
from rosetta_t5.plan.workload import input_lengths, state_shapes
from t5x import adafactor, checkpoints, models, partitioning
from t5x.examples.t5 import network


def _tiny_state() -> object:
  """A train state of the tiny model, of ones."""
  optimizer = adafactor.Adafactor(logical_factor_rules=adafactor.standard_logical_factor_rules())
  model = models.EncoderDecoderModel(network.Transformer(_config()), None, None, optimizer)
  shapes = state_shapes(model, 1, {"encoder": 4, "decoder": 4}, trained=True)
  return jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes)


def _config() -> network.T5Config:
  return network.T5Config(
    vocab_size=32128,
    emb_dim=8,
    num_heads=4,
    num_encoder_layers=2,
    num_decoder_layers=2,
    head_dim=3,
    mlp_dim=16,
    mlp_activations=("gelu", "linear"),
  )


@pytest.fixture
def saved(tmp_path):
  """Returns the checkpoint of step 1 in MODEL_DIR."""
  partitioner = partitioning.PjitPartitioner(num_partitions=1)
  manager = checkpoints.OrbaxCheckpointManagerInterface(
    str(tmp_path / "run"), _tiny_state(), partitioner
  )
  manager.save(_tiny_state())
  manager.close()
  return tmp_path / "run/checkpoint_1"


@pytest.mark.slow
def test_a_training_run_is_described_row_by_row(check):
  status, rows, output = check()
  assert status == 0, output
  assert rows["trains on"] == "some_task[train], inputs 16, targets 8, batches of 16, packed"
  assert rows["model"] == (
    "EncoderDecoderModel of rosetta_t5.networks.transformer.Transformer, 518,240 parameters, "
    "computed in bfloat16"
  )
  assert rows["mesh"] == "data 4 × model 1 on 4 devices"
  assert rows["batch"] == "16 examples, 4 per device along data"
  assert rows["optimizer"] == "Adafactor"
  assert rows["learning rate"].startswith("0.01 at 0, 0.01 at 1, 0.01 at 25")
  assert rows["starts from"] == "scratch"
  assert rows["saves"].startswith("checkpoints every 1000 steps and at start and end, all kept")
  assert rows["FLOPs"] == "203.9 MFLOP per step"  # T5X's formula
  assert rows["memory"].startswith("about ")
  assert "params 2.07 MB, optimizer " in rows["memory"]
  # On several devices no gradient exists yet when the logits' gradient does, and memory is fullest.
  assert re.search(r"optimizer \S+ MB, activations \S+ kB, logits ", rows["memory"])


@pytest.mark.one_quick_variant
@pytest.mark.parametrize(
  ("factors", "is_reported"),
  [("linear_decay", True), ("constant * linear_warmup", True), ("constant * rsqrt_decay", False)],
)
def test_a_rate_that_stays_below_a_hundredth_of_what_its_schedule_reaches_is_reported(
  check, factors, is_reported
):
  schedule = "--gin.utils.create_learning_rate_scheduler"
  _, _, output = check(f"{schedule}.factors='{factors}'", f"{schedule}.warmup_steps=1000000")
  assert ("at these steps, although the schedule reaches" in output) == is_reported


def test_a_check_asks_jax_for_no_device(check, monkeypatch):
  def fail(*_):
    raise AssertionError("a check must not use a device")

  for name in ("devices", "local_devices", "device_count", "local_device_count"):
    monkeypatch.setattr(jax, name, fail)
  status, rows, output = check()
  assert status == 0, output
  assert "unknown" not in rows, output


@pytest.mark.slow
def test_microbatches_and_model_parallelism_are_described(check):
  arguments = (
    "--gin.trainer.Trainer.num_microbatches=2",
    "--gin.trainer.Trainer.overlapping_parts=2",
    "--gin.partitioning.PjitPartitioner.num_partitions=2",
  )
  rows = check(*arguments)[1]
  assert rows["mesh"] == "data 2 × model 2 on 4 devices"
  assert rows["batch"] == "16 examples, 8 per device along data, in 4 microbatches of 4"
  assert "params 1.0" in rows["memory"]


@pytest.mark.slow
def test_all_problems_are_reported(check):
  status, _, output = check(
    "--gin.BATCH_SIZE=18",
    "--gin.utils.RestoreCheckpointConfig.path='nowhere'",
    "--gin.seqio.SentencePieceVocabulary.sentencepiece_model_file='no.model'",
    "--gin.VOCABULARY=@seqio.SentencePieceVocabulary()",
  )
  assert status == 2
  assert "3 problems" in output
  assert "batch size 18 cannot be split over the 4 devices of the mesh's data axis" in output
  assert "there is no checkpoint to restore in nowhere (mode = 'latest')" in output
  assert "\n     the command line:  utils.RestoreCheckpointConfig.path = 'nowhere'\n" in output
  assert "There is no vocabulary file no.model: give the path of an existing one" in output


@pytest.mark.slow
def test_the_checkpoint_of_model_dir_wins_over_a_missing_initial_checkpoint(check, saved):
  status, rows, output = check("--gin.utils.RestoreCheckpointConfig.path='nowhere'")
  assert status == 0, output
  assert rows["starts from"] == "run/checkpoint_1"


@pytest.mark.slow
def test_the_steps_of_a_finetuning_begin_at_its_checkpoint(check, saved):
  saved.parent.rename("pretrained")
  path = "--gin.utils.RestoreCheckpointConfig.path='pretrained/checkpoint_1'"
  start = (path, "--gin.utils.RestoreCheckpointConfig.mode='specific'")
  status, rows, output = check(*start, "--gin.TRAIN_STEPS_RELATIVE=8")
  assert status == 0, output
  assert rows["steps"].startswith("1 to 9, ")
  assert rows["learning rate"].startswith("0.01 at 1, 0.01 at 2, 0.01 at 3, ")
  status, rows, output = check(*start, "--gin.MODEL_DIR='gs://bucket/run'")  # cannot be read here
  assert status == 0, output
  assert rows["starts from"] == "pretrained/checkpoint_1"
  status, _, output = check(*start, "--gin.TRAIN_STEPS=1")
  assert status == 2
  assert "TRAIN_STEPS (train.total_steps) must be more than 1, " in output


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused(check, saved):
  status, _, output = check("--gin.network.T5Config.mlp_dim=24")
  assert status == 2
  assert "checkpoint run/checkpoint_1 does not match this run's model" in output
  assert "target/encoder/layers_0/mlp/wi_0/kernel" in output


def test_differences_from_the_last_run_are_listed(check, tmp_path):
  (tmp_path / "run").mkdir()
  (tmp_path / "run/config.gin").write_text("BATCH_SIZE = 8\nTRAIN_STEPS = 100\n")
  output = check()[2]
  assert "since the last run in run:" in output
  assert "BATCH_SIZE: 8 → 16" in output
  assert "TRAIN_STEPS" not in output.split("since the last run")[1]


def test_sharded_arrays_are_counted_per_device():
  mesh = {"data": 4, "model": 2}
  arrays = {name: jax.ShapeDtypeStruct((6, 8), jnp.float32) for name in "abc"}
  specs = {
    "a": PartitionSpec(),
    "b": PartitionSpec("data", "model"),
    "c": PartitionSpec(None, ("data", "model")),
  }
  assert sum(
    memory.array_bytes(array, specs[name], mesh) for name, array in arrays.items()
  ) == 4 * (48 + 2 * 4 + 6 * 1)


@pytest.mark.parametrize(
  ("number", "text"),
  [
    (5e15, "5,000 TB"),
    (3.1e12, "3.1 TB"),
    (11.44e9, "11.4 GB"),
    (999.7e6, "1,000 MB"),
    (310e6, "310 MB"),
    (2e4, "20 kB"),
    (0, "0 kB"),
  ],
)
def test_sizes_are_written_with_units_and_without_exponents(number, text):
  assert terminal.size_text(number) == text


@pytest.mark.parametrize(
  ("seconds", "text"),
  [
    (12_345, "12,345 s"),
    (1.534, "1.53 s"),
    (0.9997, "1,000 ms"),
    (0.0204, "20.4 ms"),
    (1.5e-5, "0.015 ms"),
    (2e-9, "0 ms"),
  ],
)
def test_times_are_written_with_units_and_without_exponents(seconds, text):
  assert terminal.format_seconds(seconds) == text


def test_an_unknown_task_is_reported(check):
  status, _, output = check("--gin.MIXTURE_OR_TASK_NAME='sone_task'")
  assert status == 2
  assert "There is no SeqIO task or mixture 'sone_task'" in output


@pytest.mark.slow
def test_a_shipped_recipe_can_be_checked_without_any_data(tmp_path):
  program = (
    "from rosetta_t5 import cli\n"
    "cli.main(['check', 'gin/examples/small_pile_pretrain.gin', \"--gin.MODEL_DIR='run'\"])"
  )
  done = subprocess.run(
    [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
  )
  assert "76,961,152 parameters" in done.stdout
  assert done.stdout.splitlines()[-1] == "The configuration is valid as far as it was checked."
  assert done.stderr == ""
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_only_training_needs_lengths_that_context_divides(check):
  lengths = "--gin.TASK_FEATURE_LENGTHS={'inputs': 15, 'targets': 8}"
  arguments = [lengths, '--gin.partitioning.PjitPartitioner.mesh={"context": 4}']
  status, _, output = check(*arguments)
  assert status == 2
  assert "the 15 positions of encoder cannot be split over the 4 devices" in output
  pathlib.Path("run.gin").write_text(
    "include 't5x/examples/t5/t5_1_1/tiny.gin'\ninclude 't5x/configs/runs/infer.gin'\n"
    "from __gin__ import dynamic_registration\nimport seqio\n"
    "MIXTURE_OR_TASK_NAME = 'some_task'\nMIXTURE_OR_TASK_SPLIT = 'train'\nDROPOUT_RATE = 0.0\n"
    "VOCABULARY = @seqio.ByteVocabulary()\nCHECKPOINT_PATH = 'none'\nINFER_OUTPUT_DIR = 'out'\n"
  )
  _, _, output = check("--run_mode=infer", *arguments)
  assert "there is no checkpoint to restore in none" in output
  assert "cannot be split" not in output


def test_a_network_without_an_encode_function_may_read_inputs():
  model = make_model(Bigram())
  lengths = input_lengths(model, {"inputs": 8, "targets": 4})
  assert state_shapes(model, 2, lengths, trained=False).params["table"].shape == (32, 32)
