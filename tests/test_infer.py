"""Inference: the contents of its files, shards, and the restart of a killed run."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
from limited_memory import limited_memory
from tiny_tasks import PAIRS, add_task, byte_model, byte_vocabulary, save_checkpoints

from rosetta_t5 import checkpoints, data
from rosetta_t5.data.tasks.file_task import create_task_from_tfexample_file
from rosetta_t5.data.tensorflow_import import import_seqio, import_tensorflow
from rosetta_t5.decoding import beam_search
from rosetta_t5.eval import evaluate
from rosetta_t5.infer import infer
from rosetta_t5.inference.result_files import (
  FailFastThreadPoolExecutor,
  merge_chunks_to_file,
  write_inferences_to_file,
)
from rosetta_t5.out_of_memory import OutOfMemoryError
from rosetta_t5.parallel import PjitPartitioner

TASK = "pairs_to_infer"
_HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  """A checkpoint of step 5."""
  add_task(TASK)
  folder = tmp_path_factory.mktemp("run")
  save_checkpoints(folder, [5])
  yield str(folder / "checkpoint_5")
  import_seqio().TaskRegistry.remove(TASK)


@pytest.fixture(scope="module")
def run(checkpoint):
  """Returns a function that infers in chunks of one batch with 8 examples."""

  def start(output_dir, dataset=None, restore=None, **arguments):
    cfg = {"task_feature_lengths": {"inputs": 16, "targets": 16}, "split": "test", "batch_size": 8}
    fixed = {"mixture_or_task_name": TASK, "shuffle": False, "seed": 0}
    given = {
      "mode": "score",
      "model": byte_model(),
      "dataset_cfg": data.DatasetConfig(**{**fixed, **cfg, **(dataset or {})}),
      "restore_checkpoint_cfg": checkpoints.RestoreCheckpointConfig(
        **{"path": checkpoint, "mode": "specific", **(restore or {})}
      ),
      "partitioner": PjitPartitioner(num_partitions=1),
      "output_dir": str(output_dir),
      "checkpoint_period": 1,
      "summarize_config_fn": lambda model_dir, summary_writer, step: None,
    }
    infer(**{**given, **arguments})

  return start


def rows(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def scored(run, tmp_path_factory):
  """The folder of a finished inference, and the rows of its file."""
  out = tmp_path_factory.mktemp("scored")
  run(out)
  return out, rows(out / f"{TASK}-score.jsonl-00000-of-00001")


@pytest.mark.slow
def test_examples_are_scored_once_in_order_and_chunks_are_removed(scored):
  out, written = scored
  assert [row["inputs"] for row in written] == [
    {"inputs_pretokenized": question, "targets_pretokenized": answer} for question, answer in PAIRS
  ]
  assert all(row["score"] < 0 for row in written)
  assert sorted(path.name for path in out.iterdir()) == [
    "model-info.txt",
    f"{TASK}-score.jsonl-00000-of-00001",
    f"{TASK}-score.jsonl-00000-of-00001.COMPLETED",
  ]


def test_finished_inference_does_nothing(scored, run, capsys):
  out, _ = scored
  path = out / f"{TASK}-score.jsonl-00000-of-00001"
  before = path.stat().st_mtime_ns
  run(out)
  assert "is complete: nothing was left to do" in capsys.readouterr().out
  assert path.stat().st_mtime_ns == before


def fails_at(chunk, path, *arguments):
  if path.endswith(chunk):
    raise OSError("no space left")
  write_inferences_to_file(path, *arguments)


@pytest.mark.slow
def test_failed_inference_continues_after_its_last_chunk(scored, run, tmp_path, capsys):
  _, expected = scored
  with pytest.raises(OSError, match="no space left"):
    run(tmp_path, write_fn=functools.partial(fails_at, "chunk00001"))
  assert not (tmp_path / f"{TASK}-score.jsonl-00000-of-00001").exists()
  capsys.readouterr()
  run(tmp_path)
  output = capsys.readouterr().out
  assert "continuing after 1 chunks" in output
  assert "chunk 0:" not in output
  assert rows(tmp_path / f"{TASK}-score.jsonl-00000-of-00001") == expected


@pytest.mark.slow
def test_chunks_with_other_settings_are_rejected(run, tmp_path):
  with pytest.raises(OSError, match="no space left"):
    run(tmp_path, write_fn=functools.partial(fails_at, "chunk00001"))
  with pytest.raises(ValueError, match=r"checkpoint_period: 1 → 2. Undo this") as error:
    run(tmp_path, checkpoint_period=2)
  assert f"tmp-{TASK}-00000-of-00001 contains the results of an earlier run" in str(error.value)


@pytest.mark.slow
def test_complete_results_of_another_checkpoint_or_model_are_refused(scored, run, tmp_path):
  out = shutil.copytree(scored[0], tmp_path / "out")
  save_checkpoints(tmp_path, [6])
  with pytest.raises(
    ValueError, match=r"Changed since: .*the checkpoint's content: .*COMPLETED to"
  ):
    run(out, restore={"path": str(tmp_path / "checkpoint_6")})
  with pytest.raises(ValueError, match=r"Changed since: the model\._decode_fn: .* alpha=0\.7"):
    run(out, model=byte_model(decode_fn=functools.partial(beam_search, alpha=0.7)))
  scaled = byte_model()
  config = dataclasses.replace(scaled.network_config, scale_attn_logits=True)
  scaled.module = scaled.module.clone(config=config)
  with pytest.raises(
    ValueError, match=r"Changed since: the model\.scale_attn_logits: False → True"
  ):
    run(out, model=scaled)


@pytest.mark.slow
def test_shards_share_the_examples(scored, run, tmp_path):
  _, expected = scored
  for shard in range(2):
    run(tmp_path, shard_id=shard, num_shards=2, merge_chunked_results=shard == 0)
  first = rows(tmp_path / f"{TASK}-score.jsonl-00000-of-00002")
  # The second shard is not merged; its five examples are one chunk.
  name = f"{TASK}-score.jsonl-00001-of-00002"
  second = rows(tmp_path / f"tmp-{TASK}-00001-of-00002" / f"{name}-chunk00000")
  assert not (tmp_path / name).exists()
  assert (tmp_path / f"{name}.COMPLETED").exists()
  assert (len(first), len(second)) == (6, 5)
  shared = [row for pair in zip(first, [*second, None], strict=True) for row in pair][:-1]
  assert [row["inputs"] for row in shared] == [row["inputs"] for row in expected]
  np.testing.assert_allclose(
    [row["score"] for row in shared], [row["score"] for row in expected], rtol=1e-5
  )


@pytest.mark.slow
def test_predictions_with_aux_contain_text_tokens_and_scores(run, tmp_path):
  write = functools.partial(
    write_inferences_to_file, output_ids=True, input_fields_to_include=["targets"]
  )
  run(tmp_path, mode="predict_with_aux", write_fn=write, restore={"dtype": "bfloat16"})
  written = rows(tmp_path / f"{TASK}-predict_with_aux.jsonl-00000-of-00001")
  assert len(written) == len(PAIRS)
  tf = import_tensorflow()
  for row in written:
    assert set(row) == {"inputs", "prediction", "prediction_tokens", "aux"}
    assert set(row["inputs"]) == {"targets", "targets_pretokenized"}
    text = byte_vocabulary().decode_tf(tf.constant(row["prediction_tokens"])).numpy().decode()
    assert row["prediction"] == text
    assert 0 not in row["prediction_tokens"]
    assert type(row["aux"]["scores"]) is float


@pytest.mark.parametrize(
  ("arguments", "text"),
  [
    ({"mode": "predictions"}, "infer.mode must be one of .*, got 'predictions'"),
    ({"shard_id": 2, "num_shards": 2}, r"infer\.shard_id must be between 0 and 1 .*, got 2"),
    ({"dataset": {"split": "tests"}}, f"The task '{TASK}' has no split 'tests'"),
    ({"dataset": {"task_feature_lengths": {"inputs": 9}}}, "must have the features"),
    ({"restore": {"path": "nowhere"}}, "no checkpoint to restore in nowhere"),
    ({"restore": {"path": "nowhere", "mode": "latest"}}, "no checkpoint to restore in nowhere"),
  ],
)
def test_invalid_arguments_are_rejected_before_anything_is_written(run, tmp_path, arguments, text):
  with pytest.raises(ValueError, match=text):
    run(tmp_path / "out", **arguments)
  assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_id_outside_the_vocabulary_is_reported_with_its_place_in_the_data(run, tmp_path):
  tf, seqio = import_tensorflow(), import_seqio()
  ids = tf.constant([[5], [6], [5000], [7]])
  feature = seqio.Feature(byte_vocabulary(), add_eos=False)
  seqio.TaskRegistry.add(
    "ids_to_infer",
    seqio.FunctionDataSource(
      lambda split, shuffle_files, seed=None: tf.data.Dataset.from_tensor_slices(
        {"inputs": ids, "targets": ids}
      ),
      ["test"],
    ),
    {"inputs": feature, "targets": feature},
    preprocessors=[],
  )
  try:
    with pytest.raises(ValueError, match=r"that begins with example 0 has the value 5000"):
      run(tmp_path, dataset={"mixture_or_task_name": "ids_to_infer"})
  finally:
    seqio.TaskRegistry.remove("ids_to_infer")


def test_unwritable_output_folder_is_reported_first(run, tmp_path):
  (tmp_path / "file").write_text("kept")
  with pytest.raises(
    ValueError, match=r"infer.output_dir = '.*/file/out' cannot be written: .*/file is not a folder"
  ):
    run(tmp_path / "file/out")
  with pytest.raises(ValueError, match=r"evaluate.output_dir = '.*/file' cannot be written"):
    evaluate(
      model=None,
      dataset_cfg=data.DatasetConfig(TASK, None, split="test", batch_size=8, shuffle=False, seed=0),
      restore_checkpoint_cfg=checkpoints.RestoreCheckpointConfig("nowhere"),
      partitioner=PjitPartitioner(num_partitions=1),
      output_dir=str(tmp_path / "file"),
    )
  assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.slow
def test_tfrecord_files_can_be_a_task(tmp_path):
  tf, seqio = import_tensorflow(), import_seqio()
  path = str(tmp_path / "examples.tfrecord")
  with tf.io.TFRecordWriter(path) as writer:
    for question, _ in PAIRS[:3]:
      text = tf.train.Feature(bytes_list=tf.train.BytesList(value=[question.encode()]))
      features = tf.train.Features(feature={"question": text})
      writer.write(tf.train.Example(features=features).SerializeToString())
  features = {name: seqio.Feature(byte_vocabulary()) for name in ("inputs", "targets")}
  name = create_task_from_tfexample_file([path], "tfrecord", "question", None, features)
  assert create_task_from_tfexample_file([path], "tfrecord", "question", None, features) == name
  examples = list(seqio.get_mixture_or_task(name).get_dataset(None, "infer", shuffle=False))
  seqio.TaskRegistry.remove(name)
  assert [e["inputs_pretokenized"].numpy().decode() for e in examples] == [q for q, _ in PAIRS[:3]]
  assert examples[0]["inputs"].numpy().tolist() == [*byte_vocabulary().encode(PAIRS[0][0]), 1]
  with pytest.raises(ValueError, match=r"There is no file '.*nothing': set TF_EXAMPLE_FILE_PATHS"):
    create_task_from_tfexample_file([f"{tmp_path}/nothing"], "tfrecord", "q", None, features)
  with pytest.raises(
    ValueError, match="TF_EXAMPLE_FILE_TYPE must be one of 'tfrecord', got 'sstable'"
  ):
    create_task_from_tfexample_file([path], "sstable", "q", None, features)


def write(path, mode="score", inferences=([1.5], {}), **options):
  tf = import_tensorflow()
  examples = {"x": [[1, 2]], "x_pretokenized": ["é"], "n": [3], "image": [b"\xff"]}
  task_ds = tf.data.Dataset.from_tensor_slices(examples)
  write_inferences_to_file(str(path), inferences, task_ds, mode, **options)
  return rows(path)


def test_written_input_fields_can_be_chosen(tmp_path):
  path = tmp_path / "file"
  assert write(path)[0]["inputs"] == {"x_pretokenized": "é"}
  assert "é" in path.read_text(encoding="utf-8")
  assert write(path, include_all_inputs=True)[0]["inputs"] == {
    "x": [1, 2],
    "x_pretokenized": "é",
    "n": 3,
    "image": "\\xff",
  }
  assert write(path, input_fields_to_include=["n"])[0]["inputs"] == {"n": 3}
  with pytest.raises(ValueError, match="both include_all_inputs and input_fields_to_include"):
    write(path, include_all_inputs=True, input_fields_to_include=["n"])
  with pytest.raises(ValueError, match="needs a vocabulary in mode 'predict'"):
    write(path, mode="predict")


def test_aux_of_scores_is_written_if_there_is_any(tmp_path):
  assert "aux" not in write(tmp_path / "file")[0]
  aux = {"layers": {"norms": ([np.array([1.0, 2.0])],)}}
  assert write(tmp_path / "file", inferences=([1.5], aux))[0]["aux"] == {
    "layers": {"norms": [[1.0, 2.0]]}
  }


@pytest.mark.parametrize("count", [4, pytest.param(100_002, marks=pytest.mark.slow)])
def test_any_number_of_chunks_is_merged_also_if_the_name_has_brackets(tmp_path, count):
  for number in range(count):
    last = number >= count - 4
    (tmp_path / f"file[1]-chunk{number:05}").write_text(f"{number}\n" if last else "")
  (tmp_path / "file[1]-chunk00000.npz").write_text("what a user's write_fn writes beside a chunk")
  merge_chunks_to_file(str(tmp_path), "file[1]", str(tmp_path), None)
  merged = (tmp_path / "file[1]").read_text()
  assert merged.split() == [str(number) for number in range(count - 4, count)]


def test_errors_of_the_thread_are_raised_by_the_next_call():
  executor = FailFastThreadPoolExecutor(max_workers=1)
  executor.submit(int, "one").exception()
  with pytest.raises(ValueError, match="invalid literal"):
    executor.submit(int, "1")
  executor.submit(int, "two")
  with pytest.raises(ValueError, match="invalid literal"):
    executor.shutdown(wait=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["score", "predict"])
def test_out_of_memory_error_of_inference_suggests_what_to_change(run, tmp_path, mode):
  large = {"task_feature_lengths": {"inputs": 4096, "targets": 16}, "batch_size": 1024}
  with limited_memory(10 << 30), pytest.raises(OutOfMemoryError) as raised:
    run(tmp_path, large, mode=mode)
  output = str(raised.value)
  assert output.startswith("a device is out of memory: RESOURCE_EXHAUSTED: Out of memory")
  assert "utils.DatasetConfig.batch_size, or --batch_size: a smaller number" in output
  run(tmp_path, {"batch_size": 8}, mode=mode)


_OUTPUT = "out/pairs_of_a_killed_run-score.jsonl-00000-of-00001"


def _start(count, folder, checkpoint):
  """Starts killed.py, or `count` processes that share its work."""
  environment = {**os.environ, "PYTHONPATH": f"{_HERE}:{_HERE.parent}", "JAX_PLATFORMS": "cpu"}
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = str(free.getsockname()[1])
  commands = [["two_processes.py", folder, checkpoint, port, str(index)] for index in range(count)]
  return [
    subprocess.Popen(
      [sys.executable, _HERE / "infer" / script, *arguments],
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for script, *arguments in (commands if count > 1 else [["killed.py", folder, checkpoint]])
  ]


def _finish(processes):
  output = [process.communicate(timeout=600)[0] for process in processes]
  assert [process.returncode for process in processes] == [0] * len(processes), output
  return output[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, checkpoint):
  """The text that one uninterrupted process writes."""
  folder = tmp_path_factory.mktemp("whole")
  _finish(_start(1, folder, checkpoint))
  return (folder / _OUTPUT).read_text()


@pytest.fixture(scope="module")
def whole_of_two(tmp_path_factory, checkpoint):
  """The text that two uninterrupted processes write."""
  folder = tmp_path_factory.mktemp("whole_of_two")
  _finish(_start(2, folder, checkpoint))
  return (folder / _OUTPUT).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_killed_processes_continue_after_their_last_chunk(tmp_path, request, checkpoint, count):
  whole = request.getfixturevalue("whole" if count == 1 else "whole_of_two")
  killed = _start(count, tmp_path, checkpoint)
  for line in killed[0].stdout:
    if line.startswith("written") and "chunk00002" in line:  # but not yet marked as complete
      break
  for process in killed:
    process.send_signal(signal.SIGKILL)
    process.communicate()
  assert [process.returncode for process in killed] == [-signal.SIGKILL] * count
  assert not list((tmp_path / "out").glob("*.COMPLETED"))
  assert "continuing after 2 chunks" in _finish(_start(count, tmp_path, checkpoint))
  assert (tmp_path / _OUTPUT).read_text() == whole


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_killed_process_ends_the_other_within_a_minute_and_nothing_is_lost(
  tmp_path, whole_of_two, checkpoint, lost
):
  processes = _start(2, tmp_path, checkpoint)
  for line in processes[0].stdout:
    if line.startswith("written") and "chunk00002" in line:
      break
  processes[lost].send_signal(signal.SIGKILL)
  output = processes[1 - lost].communicate(timeout=60)[0]
  processes[lost].communicate()
  assert processes[1 - lost].returncode not in (0, -signal.SIGKILL)
  assert re.search(rf"this run ends because process {lost}.* has died without a message", output), (
    output
  )
  assert "Traceback" not in output
  # The remaining process may complete chunks before it hears of the loss.
  assert re.search("continuing after [2-4] chunks", _finish(_start(2, tmp_path, checkpoint)))
  assert (tmp_path / _OUTPUT).read_text() == whole_of_two


@pytest.mark.slow
def test_two_processes_write_the_same_file_as_one(whole, whole_of_two):
  _assert_same(whole_of_two, whole)


def _assert_same(text, whole):
  """Asserts equal examples in the same order, and scores that are equal up to rounding."""
  rows, wanted = ([json.loads(line) for line in lines.splitlines()] for lines in (text, whole))
  assert len({json.dumps(row["inputs"]) for row in rows}) == 40
  assert [row["inputs"] for row in rows] == [row["inputs"] for row in wanted]
  scores, wanted_scores = ([row["score"] for row in of_run] for of_run in (rows, wanted))
  np.testing.assert_allclose(scores, wanted_scores, rtol=1e-5)
