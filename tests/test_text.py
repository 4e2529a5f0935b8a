"""Text in, text out: files, templates, going on, and sentences filled as they are typed."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import types

import gin
import pytest
from tiny_tasks import save_checkpoints

from rosetta_t5 import cli, text_commands
from rosetta_t5 import trained_model as opened
from rosetta_t5.config.language.gin_internals import registered_configurables

CONFIG = """
from __gin__ import dynamic_registration
import __main__ as train_script
import tiny_tasks
from t5x import partitioning
from t5x import utils

train_script.train:
  model = @tiny_tasks.byte_model()
  partitioner = @partitioning.PjitPartitioner()
  train_dataset_cfg = @utils.DatasetConfig()
partitioning.PjitPartitioner.num_partitions = 1
utils.DatasetConfig:
  mixture_or_task_name = 'none'
  task_feature_lengths = {'inputs': 16, 'targets': 12}
  split = 'train'
  batch_size = 8
  shuffle = False
  seed = 0
"""
ROWS = [{"question": f"what is {n}?", "answer": f"it is {n * n}"} for n in range(10)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
  folder = tmp_path_factory.mktemp("run")
  save_checkpoints(folder, [3, 7])
  (folder / "config.gin").write_text(CONFIG)
  return folder


@pytest.fixture(autouse=True)
def empty_gin(monkeypatch):
  monkeypatch.setattr("rosetta_t5.parallel.enable_compilation_cache", lambda: None)
  yield
  gin.clear_config()


@pytest.fixture
def rows_file(tmp_path):
  path = tmp_path / "rows.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
  return path


def test_opening_a_model_leaves_no_other_function_under_the_run_s_name(model_dir):
  main = sys.modules["__main__"]
  before = getattr(main, "train", None)
  opened.open_model_dir(model_dir)
  assert getattr(main, "train", None) is before
  assert opened.train not in [known.wrapped for known in registered_configurables()]


def test_a_language_model_goes_on_from_half_a_row_that_has_no_end(monkeypatch):
  features = []

  class Texts:
    def __init__(self, *arguments, **more):
      features.append((arguments[-1], more))

  opened = types.SimpleNamespace(
    model=None, partitioner=types.SimpleNamespace(data_mesh_size=1), state_axes=None
  )
  options = argparse.Namespace(batch_size=1, input_length=None, output_length=9, num_decodes=1)
  monkeypatch.setattr("rosetta_t5.inference.text_inference.TextInference", Texts)
  for opened.lengths in ({"targets": 11}, {"inputs": 7, "targets": 5}):
    list(
      text_commands._infer_rows(
        opened, iter(()), text_commands._Templates(None, None, "-"), options
      )
    )
  assert features == [
    ({"inputs": 5, "targets": 9}, {"inputs_end": False}),
    ({"inputs": 7, "targets": 9}, {"inputs_end": True}),
  ]


def infer(model_dir, *arguments):
  return cli.main(["infer", "--model_dir", str(model_dir), *map(str, arguments)])


def test_rows_are_answered_and_a_killed_call_is_gone_on_with(model_dir, rows_file, tmp_path, capfd):
  output = tmp_path / "answers.jsonl"
  call = ("--input", rows_file, "--template", "q: {question}", "--output", output)
  assert infer(model_dir, *call) == 0
  written = [json.loads(line) for line in output.read_text().splitlines()]
  assert [row["inputs"] for row in written] == ROWS
  assert {type(row["prediction"]) for row in written} == {str}
  assert all(row["score"] < 0 for row in written)
  whole = output.read_text()
  # As a call leaves it that was killed in the middle of the tenth line.
  output.write_text(whole[: whole.rindex('"prediction"')])
  assert infer(model_dir, *call) == 0
  again = [json.loads(line) for line in output.read_text().splitlines()]
  assert again[:9] == written[:9]
  assert (again[9]["inputs"], again[9]["prediction"]) == (ROWS[9], written[9]["prediction"])
  assert f"going on after 9 lines of {output}" in capfd.readouterr().err
  assert infer(model_dir, *call) == 0
  assert f"all 10 rows are answered in {output}" in capfd.readouterr().err


def test_targets_are_scored_and_a_step_can_be_chosen(model_dir, rows_file, capfd):
  call = ("--input", rows_file, "--template", "q: {question}", "--targets", "{answer}")
  assert infer(model_dir, *call) == 0
  last = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
  assert infer(model_dir / "checkpoint_3", *call) == 0
  first = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
  assert [set(row) for row in last] == [{"inputs", "score"}] * 10
  assert all(a["score"] != b["score"] for a, b in zip(first, last, strict=True))


def test_plain_lines_come_from_standard_input(model_dir, monkeypatch, capfd):
  monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
  assert infer(model_dir, "--input=-", "--output_length", 4) == 0
  rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
  assert [row["inputs"] for row in rows] == ["one", "two"]


@pytest.mark.parametrize(
  ("arguments", "text"),
  [
    (["--template", "{title}"], "line 1 of the input has no field 'title', which the template '{t"),
    ([], "are JSON objects, and what the model is to read of them is not said: give --template"),
    (["--input", "nothing.txt"], "there is no file 'nothing.txt': give --input a file, or - for"),
    (["--input", "/dev/null"], "there is no file '/dev/null'"),
    (["--input", "-"], "standard input holds no text: give a text or a JSON object a line"),
    (["--template", "q: {question"], "the template 'q: {question' cannot be read (expected '}'"),
    (["--template", "{question}", "--batch_size", "0"], "'0' must be a whole number, at least 1"),
    (
      ["--template", "{question}", "--model_dir", "elsewhere"],
      "elsewhere/config.gin: give the MODEL",
    ),
  ],
)
def test_what_cannot_be_answered_is_told(model_dir, rows_file, monkeypatch, capfd, arguments, text):
  monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
  with pytest.raises(SystemExit) as end:
    infer(model_dir, "--input", rows_file, *arguments)
  assert end.value.code in (1, 2)
  assert text in capfd.readouterr().err


def test_an_output_of_another_input_is_left_alone(model_dir, rows_file, tmp_path, capfd):
  output = tmp_path / "answers.jsonl"
  output.write_text('{"inputs": "something else", "prediction": "x"}\n')
  with pytest.raises(SystemExit):
    infer(model_dir, "--input", rows_file, "--template", "{question}", "--output", output)
  assert "line 1 of it is not about line 1 of the input: give another --output" in (
    capfd.readouterr().err
  )
  assert "something else" in output.read_text()


@pytest.mark.parametrize(
  ("broken", "text_said"),
  [
    (b'{"question": \n', "line 11 of the input is no JSON (Expecting value"),
    (b"[1]\n", "line 11 of the input is no JSON object: [1]"),
    (
      b'{"question": "\xff"}\n',
      'line 11 of the input is not in UTF-8: \'{"question": "\\udcff"}\\n\'',
    ),
  ],
)
def test_a_broken_line_is_told_after_those_before_it(tmp_path, broken, text_said):
  path = tmp_path / "rows.jsonl"
  path.write_bytes(b'{"question": "1"}\n' * 10 + broken)
  found = []
  with contextlib.ExitStack() as stack:
    lines = text_commands._open_input(str(path), stack)
    rows = text_commands._rows(lines, text_commands._Templates("{question}", None, "-"))
    with pytest.raises(ValueError, match=re.escape(text_said)):
      found.extend(rows)
  assert found == [{"question": "1"}] * 10


def test_a_closed_standard_input_is_told(model_dir, monkeypatch, capfd):
  monkeypatch.setattr("sys.stdin", None)
  with pytest.raises(SystemExit):
    infer(model_dir, "--input", "-")
  assert "error: standard input is closed: give --input a file" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("output", ["answers.jsonl", "-"])
def test_a_call_that_is_stopped_says_so_and_keeps_its_answers(model_dir, tmp_path, output):
  (tmp_path / "rows.txt").write_text("".join(f"text {n}\n" for n in range(100_000)))
  here = pathlib.Path(__file__).parent
  arguments = ["--model_dir", model_dir, "--input", "rows.txt", "--output", output]
  with subprocess.Popen(
    [sys.executable, "-m", "rosetta_t5.cli", "infer", *arguments], cwd=tmp_path, text=True,
    env={**os.environ, "PYTHONPATH": f"{here}:{here.parent}", "JAX_PLATFORMS": "cpu"},
    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
  ) as process:  # fmt: skip
    if output == "-":
      assert json.loads(process.stdout.readline())["inputs"] == "text 0"
      process.stdout.close()  # as `head -1` does
    else:
      wait_for_answers(tmp_path / output, process)
      process.send_signal(signal.SIGINT)
    said, status = process.stderr.read(), process.wait(60)
  assert "Traceback" not in said
  if output == "-":
    assert status == 128 + signal.SIGPIPE
    return
  assert status == 128 + signal.SIGINT
  assert "stopped: answers.jsonl keeps the answers, and the same command goes on" in said
  rows = [json.loads(line)["inputs"] for line in (tmp_path / output).read_text().splitlines()]
  assert rows == [f"text {n}" for n in range(len(rows))]


def wait_for_answers(path, process):
  end = time.monotonic() + 300
  while not (path.exists() and path.read_text().count("\n") > 8):
    assert process.poll() is None
    assert time.monotonic() < end
    time.sleep(0.1)


def test_an_output_that_cannot_be_written_is_told_before_the_model_is_opened(tmp_path, capfd):
  (tmp_path / "rows.txt").write_text("a text\n")
  for output, why in (("absent/out.jsonl", f"look at {tmp_path}/absent"), (".", "is a folder")):
    with pytest.raises(SystemExit):
      infer("no model", "--input", tmp_path / "rows.txt", "--output", tmp_path / output)
    assert why in capfd.readouterr().err


def test_a_template_that_a_row_does_not_suit_is_told(model_dir, rows_file, capfd):
  with pytest.raises(SystemExit):
    infer(model_dir, "--input", rows_file, "--template", "{question.size}")
  assert "the template '{question.size}' does not suit {'question':" in capfd.readouterr().err


@pytest.mark.parametrize("there", ["my notes", "my notes\n", '{"answer": 1}\n', "[1]\n"])
def test_a_file_that_holds_no_answers_is_left_as_it_is(
  model_dir, rows_file, tmp_path, capfd, there
):
  output = tmp_path / "notes.txt"
  output.write_text(there)
  with pytest.raises(SystemExit):
    infer(model_dir, "--input", rows_file, "--template", "{question}", "--output", output)
  assert f"--output {output} is there, and is none that this command has written" in (
    capfd.readouterr().err
  )
  assert output.read_text() == there


def test_chat_answers_until_an_empty_line(model_dir, monkeypatch, capfd):
  typed = io.BytesIO(b"no blank \xff\nthe ____ is\n\nnot reached")
  monkeypatch.setattr("sys.stdin", io.TextIOWrapper(typed, encoding="utf-8"))
  assert cli.main(["chat", str(model_dir)]) == 0
  said = capfd.readouterr().out
  assert "there is no blank to fill" in said
  assert "there is 1 blank, but the model's vocabulary has 0 extra ids" in said
  assert said.count("> ") == 3
