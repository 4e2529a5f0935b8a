"""A whole run, from the command line to its last checkpoint, and its errors for invalid input."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import re
import resource
import shutil
import socket
import subprocess
import sys

import gin
import numpy as np
import pytest
from tensorboard.backend.event_processing import event_file_loader
from tensorboard.util import tensor_util

from rosetta_t5.checkpoints import all_steps
from rosetta_t5.checkpoints.checkpoint_folders import read_arrays
from rosetta_t5.config import run_from_command_line
from rosetta_t5.run_report.contents import choose_panels, summary_row
from rosetta_t5.run_report.run_folder import read_runs
from rosetta_t5.train import train

_HERE = pathlib.Path(__file__).parent / "run"
_STEP = re.compile(r"step (\d+)/\d+  loss ([\d.]+)")

_WITHOUT_EVALUATION = "train.train_eval_dataset_cfg = None"


def t5x_tolerance(step: int) -> float:
  """Returns how far a run's numbers may be from T5X's at a step, relatively, in float32 on a CPU.

  Rounding grows tenfold in each of the last two steps: on a Zen 3 processor T5X itself is 5.5e-4 from the
  numbers that it gave on another processor.
  """
  return 1e-4 if step <= 18 else 6e-4


@pytest.fixture(autouse=True, scope="module")
def path_to_tasks():
  """Allows gin files to import run_task."""
  sys.path.insert(0, str(_HERE))
  yield
  sys.path.remove(str(_HERE))


def start(model_dir, *bindings, gin_file="run.gin"):
  """Runs a gin file in this process on eight devices; returns exit status, stdout and stderr."""
  out, err = io.StringIO(), io.StringIO()
  status = 0
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    try:
      run_from_command_line(
        train,
        [
          "train",
          f"--gin_file={_HERE / gin_file}",
          f"--gin.MODEL_DIR='{model_dir}'",
          f"--gin_search_paths={_HERE}",
          *(f"--gin.{binding}" for binding in bindings),
        ],
      )
    except SystemExit as end:
      status = end.code
    finally:
      gin.clear_config()
  return status, out.getvalue(), err.getvalue()


def logged(model_dir, name="train"):
  """Returns TensorBoard's values as {step: {metric: number}}."""
  values = {}
  for path in sorted((pathlib.Path(model_dir) / name).glob("events*")):
    for event in event_file_loader.EventFileLoader(str(path)).Load():
      for value in event.summary.value:
        found = tensor_util.make_ndarray(value.tensor)
        is_number = found.ndim == 0 and found.dtype != object
        values.setdefault(event.step, {})[value.tag] = float(found) if is_number else str(found)
  return values


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """The folder of a finished run, and its output."""
  model_dir = tmp_path_factory.mktemp("finished") / "run"
  status, out, err = start(model_dir)
  assert status == 0, err
  return model_dir, out


@pytest.mark.slow
def test_run_writes_checkpoints_metrics_and_its_configuration(finished):
  model_dir, output = finished
  assert all_steps(model_dir) == [0, 2, 3]
  assert "encoder/layers_0/mlp/wi_0/kernel" in (model_dir / "model-info.txt").read_text()
  assert "BATCH_SIZE = 8" in (model_dir / "config.gin").read_text()
  train, evaluation = logged(model_dir), logged(model_dir, "training_eval/run_upper_case")
  assert "BATCH_SIZE = 8" in train.pop(0)["config"]
  assert {1, 2, 3} <= set(train)
  assert set(evaluation) == {2, 3}
  printed = {int(step): float(loss) for step, loss in _STEP.findall(output)}
  expected = {step: train[step]["loss_per_nonpadding_target_token"] for step in (1, 2, 3)}
  assert printed == pytest.approx(expected, abs=1e-3)
  assert str(model_dir / "checkpoint_3") in output


def test_log_line_shows_rate_and_gradient_norm_as_in_tensorboard_which_has_more(finished):
  model_dir, output = finished
  cells = r"^step 3/3  loss \S+ nats/token  \S+ ms/step  eta \S+ .* grad norm (\S+)  lr (\S+) "
  shown = [float(number) for number in re.search(cells, output, re.M).groups()]
  train = logged(model_dir)[3]
  names = ("weight_gradient_norm", "learning_rate/current")
  assert shown == pytest.approx([train[name] for name in names], rel=1e-3)
  saved = read_arrays(model_dir / "checkpoint_3")
  squares = [np.sum(np.square(saved[name])) for name in saved if name.startswith("target/")]
  assert train["data/consumed_samples"] == 3 * 8
  assert train["weight_norm"] == pytest.approx(np.sqrt(sum(squares)), rel=1e-3)


def test_the_report_of_a_run_has_its_facts_and_its_metrics(finished):
  run = read_runs([str(finished[0])])[0]
  assert [(line["event"], line["step"]) for line in run.log] == [("start", 0), ("end", 3)]
  assert run.setup["mesh"] == {"data": 8, "model": 1}
  assert run.setup["lengths"]["encoder_input_tokens"] == 32
  assert run.kept_checkpoints == [0, 2, 3]
  assert len(run.variables) > 20
  panels = choose_panels([run])
  assert {panel.section for panel in panels} == {"Training", "Evaluation", "Other metrics"}
  row = summary_row(run)
  columns = ("Precision", "GPU", "#GPUs", "TP", "BS / GPU")
  assert [row[name] for name in columns] == ["float32", "–", "–", "–", "–"]


@pytest.mark.slow
def test_lengths_in_samples_and_in_steps_give_the_same_run(finished, tmp_path):
  in_samples = {  # of 8 a step
    "TRAIN_STEPS": 24,
    "utils.SaveCheckpointConfig.period": 16,
    "utils.create_learning_rate_scheduler.warmup_steps": 80_000,
  }
  bindings = [
    binding
    for scope, (length, samples) in enumerate(in_samples.items())
    for binding in (
      f"{length} = @length_{scope}/gin_utils.steps_of()",
      f"length_{scope}/gin_utils.steps_of.samples = {samples}",
    )
  ]
  status, output, err = start(tmp_path / "run", _WITHOUT_EVALUATION, *bindings)
  assert status == 0, err
  assert _STEP.findall(output) == _STEP.findall(finished[1])
  model_dirs = (finished[0], tmp_path / "run")
  ours, theirs = (read_arrays(folder / "checkpoint_3") for folder in model_dirs)
  assert ours.keys() == theirs.keys()
  for name, value in ours.items():
    np.testing.assert_array_equal(value, theirs[name], err_msg=name)


def files(folder):
  files = (path for path in folder.rglob("*") if path.is_file() and path.name != "run.lock")
  return {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.slow
def test_finished_run_does_not_train(finished, monkeypatch):
  model_dir, _ = finished
  before = files(model_dir)
  monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "highest")
  status, output, err = start(model_dir)
  assert status == 0, err
  assert "JAX_DEFAULT_MATMUL_PRECISION=highest may change the numbers of the run" in output
  assert not _STEP.search(output)
  assert re.search(r"finished|nothing (was|is) left", output), output
  assert files(model_dir) == before


# Invalid settings and their errors, which name the problem, the place where it is set, and what to change.
BAD_INPUT = {
  "unknown task": (
    "MIXTURE_OR_TASK_NAME='run_uper_case'",
    r"no SeqIO task or mixture 'run_uper_case' \(MIXTURE_OR_TASK_NAME, or --task of eval\)\. Did you mean run_upper_case\?",
  ),
  "unknown split": (
    "train/utils.DatasetConfig.split='training'",
    r"'run_upper_case' has no split 'training'; it has 'train', 'validation'. Set DatasetConfig.spl",
  ),
  "task without examples": (
    "MIXTURE_OR_TASK_NAME='run_without_examples'",
    r"There are no examples in the split 'train' .*'run_without_examples'",
  ),
  "task without a cache": (
    "USE_CACHED_TASKS=True",
    r"'run_upper_case' has no offline cache, but USE_CACHED_TASKS = True .*: set USE_CACHED_TASKS = F",
  ),
  "vocabulary larger than the model's": (
    "network.T5Config.vocab_size=256",
    r"259 tokens .* only 256 rows. Set network.T5Config.vocab_size = 384",
  ),
  "batch that does not divide over devices": (
    "BATCH_SIZE=12",
    r"batch size 12 cannot be split over the 8 devices .* set BATCH_SIZE .* to a multiple of 8, such as 8",
  ),
  "batch that does not divide into microbatches": (
    "trainer.Trainer.num_microbatches=3",
    r"the batch of 8 examples must be a multiple of trainer.Trainer.num_microbatches × overlapping_parts = 3",
  ),
  "partitions that do not divide the devices": (
    "partitioning.PjitPartitioner.num_partitions=3",
    r"PjitPartitioner.num_partitions = 3 needs a multiple of 3 devices, but there are 8",
  ),
  "missing length": (
    "TASK_FEATURE_LENGTHS={'inputs': 32}",
    r"must have the features .* set for example TASK_FEATURE_LENGTHS = {'inputs': 32, 'targets': 512}",
  ),
  "activation that does not exist": (
    "network.T5Config.mlp_activations=('gleu', 'linear')",
    r"T5Config.mlp_activations names 'gleu', which flax.linen does not have: use 'linear', 'gelu'",
  ),
  "float16": (
    "network.T5Config.dtype='float16'",
    r"T5Config.dtype = 'float16' overflows in T5's feed-forward layers: use 'bfloat16'",
  ),
  "checkpoint to start from that is not there": (
    "utils.RestoreCheckpointConfig.path='no/such/folder'",
    r"no checkpoint to restore in .*no/such/folder .*Set RestoreCheckpointConfig.path",
  ),
}


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("name", BAD_INPUT)
def test_invalid_input_gives_a_short_error_before_anything_is_written(name, tmp_path):
  binding, text = BAD_INPUT[name]
  status, _, err = start(tmp_path / "run", binding)
  assert status in (1, 2), err
  assert re.search(text, err), err
  assert "Traceback" not in err
  assert len(err) < 1500
  assert not (tmp_path / "run").exists() or not all_steps(tmp_path / "run")


@pytest.fixture
def continued(finished, tmp_path):
  """A copy of the folder of the finished run, which can be continued."""
  return shutil.copytree(finished[0], tmp_path / "run")


@pytest.mark.slow
def test_checkpoint_of_another_model_is_rejected_and_not_changed(continued):
  before = files(continued)
  status, _, err = start(continued, "TRAIN_STEPS=5", "network.T5Config.mlp_dim=64")
  assert status == 1
  assert f"checkpoint {continued}/checkpoint_3 does not match this run's model" in err
  assert re.search(
    r"wrong shape +target/decoder/layers_0/mlp/wi_0/kernel +\(16, 32\).*\(16, 64\)", err
  )
  assert "To train from scratch instead, set an empty folder (--gin.MODEL_DIR=" in err
  assert "Traceback" not in err
  assert files(continued) == before


@pytest.mark.slow
def test_error_of_another_architecture_names_the_parameters(continued):
  status, _, err = start(continued, "TRAIN_STEPS=5", "network.T5Config.mlp_activations=('relu',)")
  assert status == 1
  assert re.search(r"missing +target/decoder/layers_0/mlp/wi/kernel ", err)


def damage(checkpoint):
  """Truncates every file of a checkpoint's state to half its size."""
  for path in (checkpoint / "state").rglob("*"):
    if path.is_file():
      path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.slow
def test_run_restores_the_previous_checkpoint_if_the_latest_is_damaged(continued, caplog):
  damage(continued / "checkpoint_3")
  status, _, err = start(continued, "TRAIN_STEPS=5", _WITHOUT_EVALUATION)
  assert status == 0, err
  assert f"checkpoint {continued}/checkpoint_3 cannot be read" in caplog.text + err
  assert f"the run continues from {continued}/checkpoint_2" in caplog.text + err
  assert all_steps(continued)[-1] == 5


@pytest.mark.slow
def test_error_names_the_damaged_checkpoint_without_a_previous_one(continued):
  for step in (0, 2):
    shutil.rmtree(continued / f"checkpoint_{step}")
  damage(continued / "checkpoint_3")
  status, _, err = start(continued, "TRAIN_STEPS=5")
  assert status == 1
  assert f"checkpoint {continued}/checkpoint_3 cannot be read" in err
  assert "Traceback" not in err


@pytest.mark.slow
def test_error_of_nan_names_the_first_bad_tensor_and_the_last_good_checkpoint(tmp_path):
  status, _, err = start(
    tmp_path / "run",
    "utils.create_learning_rate_scheduler.base_learning_rate=1e38",
    "utils.SaveCheckpointConfig.period=1",
    _WITHOUT_EVALUATION,
  )
  assert status == 1
  assert re.search(r"training is not finite \(NaN or infinity\) at step \d: first in \w+", err)
  assert f"The last good checkpoint is {tmp_path}/run/checkpoint_" in err
  assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_fp8_run_can_be_resumed_in_fp8_and_in_bfloat16(tmp_path, recipe):
  bindings = (
    f"te_helper.TransformerEngineConfig.recipe = '{recipe}'",
    "utils.SaveCheckpointConfig.period = 3",
    "utils.SaveCheckpointConfig.save_dataset = True",
  )
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  status, out, err = start(whole, *bindings, "TRAIN_STEPS = 6", gin_file="fp8.gin")
  assert status == 0, err
  assert f"fp8 XLA's own matmuls, {recipe} scaling" in out
  for steps in (3, 6):
    status, _, err = start(broken, *bindings, f"TRAIN_STEPS = {steps}", gin_file="fp8.gin")
    assert status == 0, err
  assert logged(broken)[6]["loss"] == logged(whole)[6]["loss"]
  # The fp8 state of the recipe 'delayed' is in the checkpoint, and a run without fp8 ignores it.
  kept = (broken / "checkpoint_6" / "state" / "_METADATA").read_text()
  assert ("_overwrite_with_gradient" in kept) == (recipe == "delayed")
  status, out, err = start(
    broken, *bindings, "TRAIN_STEPS = 8", "train.te_config_cls = None", gin_file="fp8.gin"
  )
  assert status == 0, err
  assert "fp8 off" in out


def launch(model_dir, *arguments, gin_file=_HERE / "run.gin", environment=None):
  """Starts `python -m t5x.train` as a user does, with one CPU device per process."""
  command = [
    *(sys.executable, "-m", "t5x.train", f"--gin_file={gin_file}"),
    *(f"--gin.MODEL_DIR='{model_dir}'", *arguments),
  ]
  variables = {"PYTHONPATH": str(_HERE), "JAX_PLATFORMS": "cpu", **(environment or {})}
  return subprocess.Popen(
    command,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=os.environ | variables,
  )


def finish(process):
  out, err = process.communicate(timeout=600)
  assert process.returncode == 0, err[-3000:]
  return out


@pytest.mark.slow
def test_invalid_input_ends_the_program_without_a_traceback(tmp_path):
  process = launch(tmp_path / "run", "--gin.MIXTURE_OR_TASK_NAME='run_uper_case'")
  out, err = process.communicate(timeout=600)
  assert process.returncode == 1
  assert "There is no SeqIO task or mixture 'run_uper_case'" in err
  assert "Traceback" not in out + err


def shared_files(model_dir):
  """Returns the files of a run except those that each process writes for itself."""
  found = sorted(path.relative_to(model_dir) for path in model_dir.rglob("*") if path.is_file())
  own = re.compile(r"checkpoint_\d+/(state/|dataset/)")
  shared = [str(path) for path in found if not own.match(str(path))]
  return [re.sub(r"(tfevents)\..*", r"\1", path) for path in shared]


# Attention scores need 64 GiB per layer, which is more than the limit: the first allocation fails. With one
# layer, rematerialization would save nothing.
_TOO_LARGE = [
  "--gin.BATCH_SIZE=64",
  "--gin.network.T5Config.num_encoder_layers=4",
  "--gin.network.T5Config.num_heads=256",
  "--gin.TASK_FEATURE_LENGTHS={'inputs': 1024, 'targets': 32}",
]


# A state of 413 GB.
_STATE_TOO_LARGE = [f"--gin.network.T5Config.{name}=131072" for name in ("emb_dim", "mlp_dim")]


def launch_in_60_gib(*arguments):
  process = launch(*arguments)
  resource.prlimit(process.pid, resource.RLIMIT_AS, (60 << 30, 60 << 30))
  return process


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_out_of_memory_error_suggests_what_to_change_and_keeps_the_checkpoint(tmp_path, count):
  group = group_of(count) if count > 1 else [[]]
  processes = [launch_in_60_gib(tmp_path, *each, *_TOO_LARGE) for each in group]
  output = [process.communicate(timeout=600)[1] for process in processes]
  assert all(process.returncode > 0 for process in processes)
  assert "error: a device is out of memory: RESOURCE_EXHAUSTED: Out of memory" in output[0]
  answer = re.findall(r"^  (\S+) = ", output[0], re.MULTILINE)
  assert answer[:2] == ["trainer.Trainer.num_microbatches", "network.T5Config.remat_policy"]
  assert "Traceback" not in output[0]
  assert all_steps(tmp_path) == [0]
  assert not list(tmp_path.glob("*tmp*"))


@pytest.mark.slow
def test_a_state_that_does_not_fit_is_an_error_before_it_is_allocated(tmp_path):
  process = launch_in_60_gib(tmp_path, *_STATE_TOO_LARGE)
  _, output = process.communicate(timeout=600)
  assert process.returncode == 1
  assert "error: a device is out of memory: the train state needs 413 GB on each device" in output
  assert 'partitioning.PjitPartitioner.mesh = {"fsdp": N}' in output
  assert "num_microbatches" not in output
  assert "Traceback" not in output


def group_of(count):
  """Returns the command-line arguments of each of the processes of a run on this machine."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  group = ["--multiprocess_gpu", f"--coordinator_address=localhost:{port}"]
  return [
    [*group, f"--process_count={count}", f"--process_index={index}"] for index in range(count)
  ]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_train_like_one(tmp_path, count):
  # Each process reads its own lines, so the order of the rows, and with it their dropout, differs.
  run = ["--gin.TRAIN_STEPS=5", "--gin.network.T5Config.dropout_rate=0.0"]
  processes = [launch(tmp_path / "many", *each, *run) for each in group_of(count)]
  output = [finish(process) for process in processes]
  finish(launch(tmp_path / "one", *run))
  one, many = logged(tmp_path / "one"), logged(tmp_path / "many")
  for step in range(1, 6):
    for metric in ("loss", "accuracy", "non_padding_fraction/overall"):
      assert many[step][metric] == pytest.approx(one[step][metric], rel=1e-5), (step, metric)
  assert _STEP.search(output[0])
  assert not any(map(_STEP.search, output[1:])), "only the first process prints"
  assert all_steps(tmp_path / "many") == [0, 2, 4, 5]
  assert shared_files(tmp_path / "many") == shared_files(tmp_path / "one")
  states = [read_arrays(tmp_path / name / "checkpoint_5") for name in ("one", "many")]
  assert states[0].keys() == states[1].keys()
  for name, array in states[0].items():
    got = np.asarray(states[1][name])
    np.testing.assert_allclose(got, np.asarray(array), rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_reference_run_equals_every_metric_of_t5x_at_every_step(tmp_path, shared):
  reference = shared / "reference"
  environment = {"REFERENCE_TEXT": str(reference / "lines.txt"), "PYTHONPATH": str(reference)}
  finish(launch(tmp_path / "run", gin_file=reference / "adafactor.gin", environment=environment))
  expected = json.loads((reference / "adafactor_metrics.json").read_text())
  got = logged(tmp_path / "run")
  for step, wanted in expected.items():
    values = {name: got[int(step)].get(name) for name in wanted}
    for name, value in values.items():
      rtol = t5x_tolerance(int(step))
      np.testing.assert_allclose(value, wanted[name], rtol, err_msg=f"{name}, step {step}")
