"""The benchmarks at toy size."""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tarfile
import time

import jax
import numpy as np
import pytest
from inline_executor import InlineExecutor

from benchmarks import attention_kernels, fp8_comparison, host_scaling, optimizers, results_table
from benchmarks.turns import time_in_turns
from rosetta_t5.cli import main
from rosetta_t5.data.prepared import prepare
from rosetta_t5.data.vocabularies.sentencepiece_models import train_sentencepiece
from rosetta_t5.parallel import PjitPartitioner

ROOT = pathlib.Path(__file__).resolve().parents[1]
TOY = ["--size", "tiny", "--batch", "8", "--lengths", "16", "8", "--steps", "2"]


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
  """Disables most of XLA's optimizations: the times that the benchmarks measure do not matter here."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def run_script(monkeypatch):
  """Returns a function that runs a script of benchmarks/ as `python FILE` does, in this process."""
  # The allocator's settings would stay for all later tests of this process.
  monkeypatch.setattr("rosetta_t5.parallel.process_settings.keep_freed_memory", lambda: False)
  # What the scripts start as processes of their own runs here too.
  monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", lambda *_: InlineExecutor())

  def run(script: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    runpy.run_path(str(ROOT / "benchmarks" / f"{script}.py"), run_name="__main__")

  return run


# Every import of these packages fails, as on a GPU machine that lacks them.
_WITHOUT_GIN = """
import runpy, sys
import pytest
sys.modules.update(dict.fromkeys(["gin", "seqio", "t5", "tensorflow", "tensorflow_datasets"]))
assert pytest.main(["-q", "tests/test_on_gpu.py"]) == 0, "the tests on a GPU do not even skip"
import benchmarks.fp8_comparison, benchmarks.hugging_face
runpy.run_module("benchmarks.train_step", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_a_training_step_is_measured_without_gin_and_tensorflow_and_appears_in_the_table(
  tmp_path, capsys
):
  path = tmp_path / "tiny-fp8.json"
  more = ["--fuse-qkv", "--pack", "--fp8", "--emulate", "--loss-chunk", "4"]
  command = [sys.executable, "-c", _WITHOUT_GIN, *TOY, *more, "--json", str(path)]
  env = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAXTYPING_DISABLE": "1"}
  subprocess.run(command, cwd=ROOT, env=env, check=True)
  row = json.loads(path.read_text())
  assert row["seq_per_s_per_device"] > 0
  assert row["hlo"]["e5m2 arrays"] > 0
  assert "fp8" in row["computation"]
  capsys.readouterr()
  results_table.main(str(tmp_path))
  table = capsys.readouterr().out
  assert "| tiny-fp8 | 8 x 16/8 |" in table
  assert "dtype=bfloat16 kernel=auto fp8=True" in table


# Replaces python3: records the requested rows, and succeeds, fails or hangs at once.
STAND_IN = """#!/usr/bin/env bash
[[ $* == *results_table* ]] && exec {python} "$@"
for word in "$@"; do [[ $word == *.json ]] && out=$word; done
name=$(basename "$out" .json)
echo "$name" >> {calls}
if [[ $name == base-bf16-fused ]]; then echo starting; echo "ValueError: no | kernel"; exit 1; fi
if [[ $name == small-fp8-cudnn && -e {hang} ]]; then sleep 600; fi
cp {row} "$out"
"""


@pytest.fixture
def gpu_sh(tmp_path):
  """Returns a function that starts `gpu.sh base small` with a stand-in for python3, and its folder."""
  row = {"size": "x", "batch": 1, "lengths": [8, 4], "device": "1 toy", "versions": "jax 0"}
  row |= {"step_ms": 1.0, "seq_per_s_per_device": 1.0, "tflops_per_device": 1.0, "mfu": None}
  row |= {"peak_memory_gb": None, "compile_s": 1.0, "switches": "", "hlo": {}}
  names = {name: tmp_path / name for name in ("calls", "hang", "row")}
  names["row"].write_text(json.dumps(row))
  (tmp_path / "python").write_text(STAND_IN.format(python=sys.executable, **names))
  (tmp_path / "python").chmod(0o755)
  results = tmp_path / "results"

  def start(**more: str) -> subprocess.Popen[str]:
    env = os.environ | {"RESULTS": str(results), "PYTHON": str(tmp_path / "python")} | more
    command = ["bash", "benchmarks/gpu.sh", "base", "small"]
    return subprocess.Popen(
      command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )

  return start, tmp_path


@pytest.mark.slow
def test_gpu_sh_resumes_after_a_kill_and_continues_after_a_failed_row(gpu_sh):
  start, folder = gpu_sh
  calls, results = folder / "calls", folder / "results"
  (folder / "hang").touch()
  with start() as killed:
    while not calls.exists() or "small-fp8-cudnn" not in calls.read_text():
      assert killed.poll() is None
      time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
  kinds = "bf16-xla", "bf16-fused", "fp8-cudnn"
  asked = [f"{size}-{kind}" for kind in kinds for size in ("small", "base")]
  assert calls.read_text().split() == asked[:5]  # the most important rows first, for each size
  table = (results / "results.md").read_text()
  assert "| base-bf16-xla |" in table
  assert "| base-bf16-fused | ValueError: no / kernel |" in table
  assert "small-fp8-cudnn" not in table

  (folder / "hang").unlink()
  output = start(PACK=str(folder / "all.tgz")).communicate()[0]
  again = calls.read_text().split()[5:]
  assert again[:2] == ["small-fp8-cudnn", "base-fp8-cudnn"]
  assert not set(again) & set(asked[:4])
  assert output.count("already measured") == 3
  assert "== base-bf16-fused: failed before; delete" in output
  rows = {path.stem for path in results.glob("*.json")}
  assert len(rows) == 13
  with tarfile.open(folder / "all.tgz") as packed:
    assert {f"./{name}.json" for name in rows} < set(packed.getnames())


def test_gpu_sh_measures_nothing_without_time_left(gpu_sh):
  start, folder = gpu_sh
  output = start(BUDGET_S="59").communicate()[0]
  assert output.count("no time left; call again") == 14
  assert not (folder / "calls").exists()


def test_an_unknown_row_is_an_error():
  command = ["bash", "benchmarks/gpu.sh", "small", "huge"]
  output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert output.returncode == 2
  assert (
    "unknown row 'huge': tests attention small base large xl fp8-loss hf smoke" in output.stderr
  )


def test_a_failing_kernel_does_not_prevent_the_others(tmp_path):
  path = tmp_path / "attention.json"
  toy = ["--batch", "1", "--heads", "1", "--repeats", "1", "--attentions", "decoder"]
  attention_kernels.main([*toy, "--kernels", "cudnn", "xla", "--pack", "--json", str(path)])
  failed, timed = json.loads(path.read_text())
  assert failed["error"] == "cuDNN does not support segments"
  assert timed["ms"] > 0
  results_table.main(str(tmp_path))


@pytest.mark.slow
def test_every_kind_of_row_runs_without_a_gpu_and_only_once(tmp_path):
  command = ["bash", "benchmarks/gpu.sh", "smoke"]
  env = os.environ | {"RESULTS": str(tmp_path), "PYTHON": sys.executable}
  out = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
  assert "failed" not in out.stdout, out.stdout
  rows = {path.stem for path in tmp_path.glob("*.json")}
  kinds = {"bf16-xla", "fp8", "bf16-pack", "attention", "fp8-loss"}
  assert {f"smoke-{kind}" for kind in kinds} <= rows
  again = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
  assert again.stdout.count("already measured") == len(rows)
  assert (tmp_path / "results.md").read_text().count("| smoke-") >= 4


def test_text_batches_keep_every_token_and_depend_only_on_their_number():
  text = np.arange(3, 3 + 500, dtype=np.int32)
  batches = list(itertools.islice(fp8_comparison.text_batches(text, 2, (40, 16), 1024), 3))
  again = list(itertools.islice(fp8_comparison.text_batches(text, 2, (40, 16), 1024), 3))
  for batch, other in zip(batches, again, strict=True):
    assert all(np.array_equal(batch[name], other[name]) for name in batch)
    inputs, targets = batch["encoder_input_tokens"], batch["decoder_target_tokens"]
    assert inputs.shape == (2, 40)
    assert targets.shape == (2, 16)
    for row in range(2):
      tokens = np.concatenate([inputs[row], targets[row]])
      own = np.sort(tokens[(tokens > 1) & (tokens < 900)])
      # No token is lost or repeated.
      assert np.array_equal(own, np.arange(own[0], own[0] + len(own)))
  assert not np.array_equal(batches[0]["encoder_input_tokens"], batches[1]["encoder_input_tokens"])


def test_targets_that_are_too_short_are_an_error():
  with pytest.raises(ValueError, match="--lengths 40 8: the second length must be at least"):
    next(fp8_comparison.text_batches(np.arange(500), 2, (40, 8), 1024))


@pytest.mark.parametrize(
  ("loss_ratio", "noise", "speedup", "emulated", "text"),
  [
    (1.002, 0.001, 1.2, False, "use fp8: 1.20x the speed of bfloat16"),
    (0.980, 0.001, 1.2, False, "use fp8: 1.20x the speed of bfloat16"),
    (1.002, 0.001, 1.01, False, "do not use fp8: it runs at only 1.01x"),
    (1.021, 0.010, 1.5, False, "do not use fp8: its loss is 2.1% above"),
    (1.300, 0.100, 1.5, False, "do not use fp8: its loss is 30.0% above"),
    (
      1.019,
      0.010,
      1.5,
      False,
      "inconclusive: the loss of fp8 differs by +1.9% from that of bfloat16",
    ),
    (0.982, 0.024, 1.5, False, "two bfloat16 runs differ by 2.4% because of rounding alone"),
    (float("nan"), 0.001, 1.5, False, "do not use fp8"),
    (0.99, 0.001, 0.5, True, "its speed can be measured only on hardware"),
  ],
)
def test_fp8_is_recommended_if_it_is_faster_and_learns_as_well_within_the_noise(
  loss_ratio, noise, speedup, emulated, text
):
  assert text in fp8_comparison.recommendation(loss_ratio, noise, speedup, emulated)


def test_noise_is_the_larger_difference_of_the_last_two_quarters():
  losses = [4.0, 4.0, 3.0, 3.0, 2.0, 2.0, 1.0, 1.0]
  again = [9.0, 9.0, 9.0, 9.0, 2.0, 2.1, 1.1, 0.9]
  assert fp8_comparison.noise_between(losses, losses) == 0
  assert fp8_comparison.noise_between(losses, again) == pytest.approx(0.025)
  assert fp8_comparison.noise_between([2.0], [2.2]) == pytest.approx(0.1)


@pytest.mark.slow
def test_runs_learn_the_same_and_differ_by_rounding(capsys, monkeypatch, tmp_path):
  path = tmp_path / "fp8.json"
  size = ["--size", "tiny", "--batch", "8", "--lengths", "64", "32", "--steps", "40"]
  monkeypatch.setattr("sys.argv", ["fp8_comparison", *size, "--emulate", "--json", str(path)])
  fp8_comparison.main()
  result = json.loads(path.read_text())
  assert list(result["runs"]) == ["bfloat16", "bfloat16, nudged", "fp8"]
  plain, nudged, eight_bits = (np.array(run["losses"]) for run in result["runs"].values())
  for other in (nudged, eight_bits):
    assert not np.array_equal(plain, other)
    np.testing.assert_allclose(other, plain, rtol=0.02)
  assert plain[-10:].mean() < plain[0] - 2
  assert 0 < result["noise"] < 0.01
  assert result["recommendation"].startswith("fp8 learns as well as bfloat16")
  assert "noise 0.0" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("arguments", "status", "text"),
  [
    (["--batch", "0"], 2, "argument --batch: must be a positive integer, got '0'"),
    (["--size", "huge"], 2, "argument --size: invalid choice: 'huge'"),
    (["--loss-chunk", "0"], 2, "argument --loss-chunk: must be a positive integer, got '0'"),
    (["--batch", "3"], 1, "error: --batch must be a multiple of the 8 devices, got 3"),
    (["--fp8"], 1, "but a cpu has no fp8"),
    (["--kernel", "cudnn"], 1, "error: T5Config.attention_kernel = 'cudnn' needs an NVIDIA GPU"),
  ],
)
def test_wrong_arguments_are_errors_before_anything_compiles(arguments, status, text, capsys):
  with pytest.raises(SystemExit) as ended:
    main(["bench", *TOY, *arguments])
  assert ended.value.code == status
  assert text in capsys.readouterr().err


# Script → arguments that make it small.
SCRIPTS = {
  "attention_kernels": "--batch=1 --heads=1 --repeats=1 --attentions=decoder --kernels=xla",
  "checkpoint": "--size=tiny --repeats=1 --checksums",
  "cpu_step": "--size=tiny --lengths 16 8 --steps=1 --optimizer muon",
  "decode": "--size=tiny --batch-size=2 --lengths 16 4 --beams=1 --runs=1",
  "feed": "--books={folder}/*.md --vocab={folder}/m.model --seconds=0.1 --batch=2",
  "fusion_bytes": "{folder}/compiled/step.json --size=small",
  "int8_products": "--rounds=1 --largest=512",
  "results_table": "{folder}",
  "serving": "--size=tiny --lengths 8 4 --requests=3 --rounds=1",
}
# Other tests run these scripts.
TESTED_APART = {
  "flash_kernels",
  "fp8_comparison",
  "gpu_programs",
  "host_scaling",
  "hugging_face",
  "optimizers",
  "scaling",
  "train_step",
}


def test_every_script_is_run_by_these_tests():
  scripts = (path for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text())
  assert {path.stem for path in scripts} == SCRIPTS.keys() | TESTED_APART


@pytest.fixture(scope="module")
def toy_data(tmp_path_factory):
  """Returns a folder with a text and a vocabulary trained on it."""
  folder = tmp_path_factory.mktemp("toy")
  words = [f"word{n}" for n in range(200)]
  (folder / "book.md").write_text(" ".join(words * 100))
  gate = {
    "kind": "loop fusions",
    "source": "forward encoder/layers/mlp/mul",
    "bytes": 3,
    "count": 8,
  }
  (folder / "compiled").mkdir()
  (folder / "compiled/step.json").write_text(json.dumps({"kernels": [gate]}))
  (folder / "m.model").write_bytes(train_sentencepiece([" ".join(words)] * 20, vocab_size=30))
  return folder


# These take 15 s each; quick tests measure a step, a feed and a checkpoint.
_LONG = ("checkpoint", "cpu_step", "feed")


@pytest.mark.one_quick_variant
@pytest.mark.parametrize(
  "script", [pytest.param(x, marks=[pytest.mark.slow] * (x in _LONG)) for x in SCRIPTS]
)
def test_a_script_runs_to_its_last_line(script, toy_data, run_script, capsys):
  run_script(script, *SCRIPTS[script].format(folder=toy_data).split())
  assert capsys.readouterr().out.strip()


def test_implementations_run_in_turns_and_in_processes_of_their_own():
  makers = {name: functools.partial(functools.partial, os.getpid) for name in ("ours", "theirs")}
  timed = time_in_turns(makers, runs=3)
  assert [len(runs) for runs in timed.values()] == [3, 3]
  assert all(run.seconds > 0 <= run.cpu_seconds for runs in timed.values() for run in runs)
  pids = [{run.result for run in runs} for runs in timed.values()]
  assert [len(each) for each in pids] == [1, 1]
  assert len({os.getpid(), *pids[0], *pids[1]}) == 3


def test_a_process_that_dies_is_named():
  dies = functools.partial(functools.partial, os._exit, 3)
  with pytest.raises(ValueError, match="the process of 'theirs' has died"):
    time_in_turns({"theirs": dies}, runs=1)


@pytest.mark.slow
def test_the_parts_of_the_host_s_work_are_measured(toy_data, tmp_path):
  prepare(f"{toy_data}/*.md", f"{toy_data}/m.model", tmp_path / "tokens", executor=InlineExecutor())
  partitioner = PjitPartitioner(mesh={"fsdp": 4, "data": 2})
  result = {
    "feed": host_scaling.time_feed(partitioner, tmp_path, count=1, batches=1),
    **host_scaling.time_checkpoint(partitioner, tmp_path, "tiny"),
    "summary": host_scaling.time_metrics(partitioner, tmp_path),
  }
  assert all(part["wall"] > 0 for part in result.values())
  assert host_scaling.row(1, result).startswith("| 1 | ")


@pytest.mark.slow
def test_the_host_work_of_several_processes_is_measured():
  command = [sys.executable, "-m", "benchmarks.host_scaling", "--size", "tiny", "--counts", "2"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  count, *numbers = [cell.split()[0] for cell in done.stdout.splitlines()[-1].split("|")[1:-1]]
  assert count == "2"
  assert len(numbers) == 8
  assert all(float(number.replace(",", "")) > 0 for number in numbers)


@pytest.mark.slow
def test_scaling_is_planned_and_drawn(tmp_path):
  pytest.importorskip("matplotlib")
  command = [sys.executable, "-m", "benchmarks.scaling", "--gpus", "64"]
  command += ["--json", tmp_path / "scaling.json", "--svg", tmp_path / "scaling.svg"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  speeds = [row.split("|")[4] for row in done.stdout.splitlines() if row.startswith("| 64 |")]
  assert len(speeds) == 4
  assert all(float(speed.replace(",", "")) > 0 for speed in speeds)
  assert (tmp_path / "scaling.svg").read_text().startswith("<?xml")


@pytest.mark.slow
def test_optimizers_are_compared():
  args = argparse.Namespace(steps=3, width=12, seeds=2)
  tokens = np.random.default_rng(0).integers(1, 4096, 1000).astype(np.int32)
  data = list(optimizers.batches("gpt", tokens, 2, steps=4))
  result = optimizers.compare("gpt", "adamw", args, data)
  assert [run["seed"] for run in result["runs"]] == [0, 0, 0, 1]
  assert all(len(run["losses"]) == 3 for run in result["runs"])
  assert result["bytes_per_parameter"] == pytest.approx(8, rel=1e-3)
  assert "| gpt | adamw | 0.001, 0.003, 0.01 |" in optimizers.table([result])
