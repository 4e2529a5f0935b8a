"""`rosetta-t5 infer --input` and `chat`: files, templates, continued outputs, typed sentences."""

from __future__ import annotations

import gzip
import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import types
from collections import Counter

import gin
import pyarrow.parquet
import pytest
from tiny_tasks import save_checkpoints

from rosetta_t5 import cli
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
  monkeypatch.setattr("rosetta_t5.parallel.process_settings.enable_compilation_cache", lambda: None)
  yield
  gin.clear_config()


@pytest.fixture
def rows_file(tmp_path):
  path = tmp_path / "rows.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
  return path


@pytest.mark.slow
def test_opening_a_model_does_not_replace_the_run_function(model_dir):
  main = sys.modules["__main__"]
  before = getattr(main, "train", None)
  opened.open_model_dir(model_dir, trust=True)
  assert getattr(main, "train", None) is before
  assert opened.train not in [known.wrapped for known in registered_configurables()]


@pytest.fixture
def echo_model(monkeypatch):
  """A model whose predictions are its inputs; records how its inference was built."""
  model = types.SimpleNamespace(
    model=None,
    partitioner=types.SimpleNamespace(data_mesh_size=1),
    state=None,
    state_axes=None,
    lengths={"inputs": 7, "targets": 5},
    built=[],
    inferred=[],
  )

  class EchoInference:
    def __init__(self, *arguments, **options):
      model.built.append((arguments[-1], options))

    def count_truncated(self, examples):
      return Counter(inputs=sum(len(example["input"]) > 20 for example in examples))

    def infer(self, mode, examples, preprocessors, state, seed, **options):
      model.inferred += [example["input"] for example in examples]
      pairs = [(example, example["input"].encode()) for example in examples]
      return pairs, {"scores": [0.0] * len(examples)}

  monkeypatch.setattr("rosetta_t5.trained_model.open_model_dir", lambda *arguments: model)
  monkeypatch.setattr(
    "rosetta_t5.trained_model.find_recipe", lambda path: (path, pathlib.Path(path))
  )
  monkeypatch.setattr("rosetta_t5.inference.text_inference.TextInference", EchoInference)
  return model


def test_a_language_model_continues_half_a_row_without_an_end_token(echo_model, monkeypatch):
  for echo_model.lengths in ({"targets": 11}, {"inputs": 7, "targets": 5}):
    type_lines(monkeypatch, b"a text\n")
    assert infer("unused", "--input=-", "--output_length", 9) == 0
  assert echo_model.built == [
    ({"inputs": 5, "targets": 9}, {"inputs_end": False}),
    ({"inputs": 7, "targets": 9}, {"inputs_end": True}),
  ]


def test_texts_of_similar_lengths_are_computed_together_and_written_in_order(
  echo_model, tmp_path, capfd
):
  lines = ["a long text", "short", "", "a longer text", "text", "of words"]
  (tmp_path / "lines.txt").write_text("\n".join(lines))
  assert infer("unused", f"--input={tmp_path / 'lines.txt'}", "--batch_size", 2) == 0
  rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
  assert [row["prediction"] for row in rows] == lines
  assert echo_model.inferred == sorted(filter(None, lines), key=len)


def test_a_missing_model_is_reported_before_a_missing_template(tmp_path, capfd):
  (tmp_path / "rows.jsonl").write_text('{"question": "1"}\n')
  with pytest.raises(SystemExit):
    infer(tmp_path / "missing", "--input", tmp_path / "rows.jsonl")
  assert f"There is no folder {tmp_path / 'missing'}" in capfd.readouterr().err


def type_lines(monkeypatch, text):
  monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))


def infer(model_dir, *arguments):
  return cli.main(["infer", "--trust", "--model_dir", str(model_dir), *map(str, arguments)])


@pytest.mark.slow
def test_rows_are_predicted_and_a_killed_call_is_continued(model_dir, rows_file, tmp_path, capfd):
  output = tmp_path / "results.jsonl"
  call = ("--input", rows_file, "--template", "q: {question}", "--output", output)
  assert infer(model_dir, *call) == 0
  written = [json.loads(line) for line in output.read_text().splitlines()]
  assert [row["inputs"] for row in written] == ROWS
  assert {type(row["prediction"]) for row in written} == {str}
  assert all(row["score"] < 0 for row in written)
  whole = output.read_text()
  # The output of a call that was killed in the middle of the tenth line.
  output.write_text(whole[: whole.rindex('"prediction"')])
  assert infer(model_dir, *call) == 0
  again = [json.loads(line) for line in output.read_text().splitlines()]
  assert again[:9] == written[:9]
  assert (again[9]["inputs"], again[9]["prediction"]) == (ROWS[9], written[9]["prediction"])
  assert f"continuing after 9 lines of {output}" in capfd.readouterr().err
  assert infer(model_dir, *call) == 0
  assert f"continuing after 10 lines of {output}" in capfd.readouterr().err


@pytest.mark.slow
def test_an_output_of_another_checkpoint_or_template_is_not_continued(model_dir, tmp_path, capfd):
  rows_file, output = tmp_path / "rows.jsonl", tmp_path / "results.jsonl"
  rows_file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:1]))
  call = ("--input", rows_file, "--output", output, "--template")
  assert infer(model_dir, *call, "q: {question}") == 0
  with pytest.raises(SystemExit):
    infer(model_dir / "checkpoint_3", *call, "q: {question}")
  assert "Changed since: checkpoint: checkpoint_7 → checkpoint_3" in capfd.readouterr().err
  with pytest.raises(SystemExit):
    infer(model_dir, *call, "Q: {question}")
  assert "Changed since: --template: q: {question} → Q: {question}" in capfd.readouterr().err


@pytest.mark.slow
def test_targets_are_scored_and_a_step_can_be_chosen(model_dir, rows_file, capfd):
  call = ("--input", rows_file, "--template", "q: {question}", "--targets", "{answer}")
  assert infer(model_dir, *call) == 0
  last = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
  assert infer(model_dir / "checkpoint_3", *call) == 0
  first = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
  assert [set(row) for row in last] == [{"inputs", "score"}] * 10
  assert all(a["score"] != b["score"] for a, b in zip(first, last, strict=True))


@pytest.mark.slow
def test_plain_lines_come_from_standard_input(model_dir, monkeypatch, capfd):
  type_lines(monkeypatch, b"one\ntwo\n")
  assert infer(model_dir, "--input=-", "--output_length", 4) == 0
  rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
  assert [row["inputs"] for row in rows] == ["one", "two"]


def test_each_line_has_a_result_also_an_empty_one(echo_model, tmp_path, capfd):
  lines = ["", "one", " ", "two", "three", ""]
  (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in lines))
  assert infer("unused", "--input", tmp_path / "in.txt", "--batch_size=2") == 0
  printed = capfd.readouterr()
  rows = [json.loads(line) for line in printed.out.splitlines()]
  assert [(row["inputs"], row["prediction"]) for row in rows] == [(x, x.strip()) for x in lines]
  assert [row["score"] for row in rows] == [None, 0.0, None, 0.0, 0.0, None]
  (tmp_path / "in.jsonl").write_text('{"q": "a"}\n \n{"q": "b"}\n')
  assert infer("unused", "--input", tmp_path / "in.jsonl", "--template={q}") == 0
  rows = [json.loads(line)["inputs"] for line in capfd.readouterr().out.splitlines()]
  assert rows == [{"q": "a"}, " ", {"q": "b"}]


@pytest.mark.parametrize(
  ("name", "content", "numbers"),
  [
    ("rows.csv", 'q,n\n"x, ""y""",1\nこ,2\n', "12"),
    ("rows.tsv", 'q\tn\n"x, ""y"""\t1\nこ\t2\n', "12"),
    ("rows.json", '[{"q": "x, \\"y\\"", "n": 1},\n {"q": "こ", "n": 2}]', (1, 2)),
    ("rows.json.gz", '[{"q": "x, \\"y\\"", "n": 1},\n {"q": "こ", "n": 2}]', (1, 2)),
    ("rows.parquet", None, (1, 2)),
  ],
)
def test_rows_are_read_as_in_training(echo_model, tmp_path, capfd, name, content, numbers):
  path = tmp_path / name
  if content is None:
    columns = {"q": [b'x, "y"', "こ".encode()], "n": [1, 2]}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
  else:
    data = content.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
  assert infer("unused", "--input", path, "--template", "q: {q}") == 0
  rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
  assert [row["prediction"] for row in rows] == ['q: x, "y"', "q: こ"]
  texts = ('x, "y"', "こ")
  expected = [{"q": q, "n": n} for q, n in zip(texts, numbers, strict=True)]
  assert [row["inputs"] for row in rows] == expected
  with pytest.raises(SystemExit):
    infer("unused", "--input", path)
  assert "have columns: give the model's input" in capfd.readouterr().err


def test_results_are_written_as_utf_8_whatever_the_locale(echo_model, tmp_path, monkeypatch):
  (tmp_path / "in.txt").write_text("こ\n")
  written = io.BytesIO()
  monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="latin-1"))
  assert infer("unused", "--input", tmp_path / "in.txt") == 0
  assert json.loads(written.getvalue().decode())["prediction"] == "こ"


# The same model as `tiny_tasks.byte_model`, of which gin configures each part.
GIN_MODEL = """
from t5x import adafactor
from t5x import decoding
from t5x import models
from t5x.examples.t5 import network
models.EncoderDecoderModel:
  module = @network.Transformer()
  input_vocabulary = @tiny_tasks.byte_vocabulary()
  output_vocabulary = @tiny_tasks.byte_vocabulary()
  optimizer_def = @adafactor.Adafactor()
network.Transformer.config = @network.T5Config()
network.T5Config:
  vocab_size = 384
  emb_dim = 16
  num_heads = 2
  num_encoder_layers = 1
  num_decoder_layers = 1
  head_dim = 8
  mlp_dim = 32
  dropout_rate = 0.0
"""


@pytest.fixture
def gin_model_dir(model_dir, tmp_path):
  folder = tmp_path / "run"
  shutil.copytree(model_dir, folder)
  text = CONFIG.replace("@tiny_tasks.byte_model()", "@models.EncoderDecoderModel()")
  header, imports, rest = text.partition("import tiny_tasks\n")
  (folder / "config.gin").write_text(header + imports + GIN_MODEL + rest)
  return folder


@pytest.mark.slow
def test_samples_of_equal_texts_differ_from_batch_to_batch(gin_model_dir, monkeypatch, capfd):
  type_lines(monkeypatch, b"one\n" * 16)
  sampling = "models.EncoderDecoderModel.decode_fn=@decoding.temperature_sample"
  flags = [f"--gin.{sampling}", "--gin.decoding.temperature_sample.topk=0"]
  assert infer(gin_model_dir, "--input=-", "--output_length=8", "--batch_size=8", *flags) == 0
  lines = capfd.readouterr().out.splitlines()
  assert len(lines) == 16
  assert lines[:8] != lines[8:]


@pytest.mark.slow
@pytest.mark.parametrize(
  "arguments",
  [
    ["--n_best=3"],
    ["--n_best=2", "--num_decodes=3"],
    ["--n_best=3", "--gin.models.EncoderDecoderModel.decode_fn=@decoding.temperature_sample"],
    [
      "--num_decodes=3",
      "--gin.models.EncoderDecoderModel.predict_batch_with_aux.return_all_decodes=True",
    ],
    [
      "--gin.models.EncoderDecoderModel.default_decoder_params=@models.DecoderParams()",
      "--gin.models.DecoderParams.num_decodes=3",
      "--gin.models.DecoderParams.return_all_decodes=True",
    ],
  ],
)
def test_the_n_best_predictions_have_scores_the_best_first(
  gin_model_dir, monkeypatch, capfd, arguments
):
  type_lines(monkeypatch, b"one\ntwo\n")
  assert infer(gin_model_dir, "--input=-", "--output_length=4", *arguments) == 0
  for row in map(json.loads, capfd.readouterr().out.splitlines()):
    ranked = row["n_best"]
    assert len(ranked) == (2 if "--n_best=2" in arguments else 3)
    assert {"prediction": row["prediction"], "score": row["score"]} == ranked[0]
    assert ranked == sorted(ranked, key=lambda one: -one["score"])
    assert ranked[0] != ranked[1]


@pytest.mark.parametrize(
  ("flag", "message"),
  [
    ("--gin.train_script.train.eval_steps=3", "train_script.train.eval_steps has no effect: this"),
    ("--gin.utils.DatasetConfig.batch_size=3", "utils.DatasetConfig.batch_size has no effect: "),
    ("--gin.decoding.beam_search.alpha=0.0", "refer to it (models.EncoderDecoderModel.decode_fn"),
    (
      "--gin.infer.mode='score'",
      "has no effect with --model_dir: give --mode and the other options",
    ),
    ("--repetition_penalty=0", "must be a number greater than 0, got '0'"),
  ],
)
def test_options_without_an_effect_are_refused(gin_model_dir, monkeypatch, capfd, flag, message):
  type_lines(monkeypatch, b"one\n")
  with pytest.raises(SystemExit):
    infer(gin_model_dir, "--input=-", "--output_length=4", "--n_best=3", flag)
  assert message in capfd.readouterr().err


@pytest.mark.slow
def test_decoding_options_change_predictions_and_are_recorded(model_dir, tmp_path, capfd):
  (tmp_path / "in.txt").write_text("one\ntwo\n")
  call = ["--input", tmp_path / "in.txt", "--output", tmp_path / "out.jsonl"]
  assert infer(model_dir, *call, "--min_new_tokens=12", "--bad_word=g") == 0
  rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
  assert not any("g" in row["prediction"] for row in rows)
  with pytest.raises(SystemExit):
    infer(model_dir, *call)
  error = capfd.readouterr().err
  assert "Changed since: --bad_word: ['g'] → None; --min_new_tokens: 12 → None" in error


@pytest.mark.parametrize(
  ("arguments", "text"),
  [
    (["--template", "{title}"], "rows.jsonl cannot be used: no column 'title' among"),
    ([], "have columns: give the model's input, such as --template"),
    (
      ["--input", "nothing.txt"],
      "error: There is no file 'nothing.txt'",
    ),
    (["--input", "/dev/null"], "/dev/null contains no text"),
    (["--input", "-"], "Standard input contains no text: give one text or JSON object per line"),
    (
      ["--template", "q: {question"],
      'input = "q: {question" is not a valid template',
    ),
    (["--template", "{question}", "--batch_size", "0"], "must be a positive integer, got '0'"),
    (
      ["--template", "{question}", "--model_dir", "elsewhere"],
      "There is no folder elsewhere: give the",
    ),
  ],
)
def test_input_that_cannot_be_used_is_refused(
  model_dir, rows_file, monkeypatch, capfd, arguments, text
):
  type_lines(monkeypatch, b"")
  with pytest.raises(SystemExit) as end:
    infer(model_dir, "--input", rows_file, *arguments)
  assert end.value.code in (1, 2)
  assert text in capfd.readouterr().err


@pytest.mark.slow
def test_an_output_of_another_input_is_not_changed(model_dir, rows_file, tmp_path, capfd):
  output = tmp_path / "results.jsonl"
  call = ("--template", "{question}", "--output", output)
  (tmp_path / "other.jsonl").write_text('{"question": "something else"}\n')
  assert infer(model_dir, "--input", tmp_path / "other.jsonl", *call) == 0
  with pytest.raises(SystemExit):
    infer(model_dir, "--input", rows_file, *call)
  assert "its line 1 does not belong to row 1 of the input: give another --output" in (
    capfd.readouterr().err
  )
  assert "something else" in output.read_text()


@pytest.mark.parametrize(
  ("broken", "message"),
  [
    (b'{"question": \n', "rows.jsonl cannot be used: invalid JSON: Expecting value"),
    (b"[1]\n", "rows.jsonl cannot be used: a JSON list, not an object"),
    (
      b'{"question": "\xff"}\n',
      "rows.jsonl cannot be used: question contains a NUL character or is not text in UTF-8",
    ),
  ],
)
def test_a_broken_line_is_reported_after_the_sorted_batches_before_it(
  echo_model, tmp_path, capfd, broken, message
):
  path = tmp_path / "rows.jsonl"
  path.write_bytes(b'{"question": "1"}\n' * 40 + broken)
  with pytest.raises(SystemExit):
    infer("unused", "--input", path, "--template", "{question}", "--batch_size", 5)
  output = capfd.readouterr()
  assert f"Line 41 of {path}" in output.err
  assert message in output.err
  written = [json.loads(line) for line in output.out.splitlines()]
  assert written == [{"inputs": {"question": "1"}, "prediction": "1", "score": 0.0}] * 40


@pytest.mark.slow
@pytest.mark.parametrize("output", ["results.jsonl", "-"])
def test_a_stopped_call_keeps_its_results(model_dir, tmp_path, output):
  (tmp_path / "rows.txt").write_text("".join(f"text {n}\n" for n in range(100_000)))
  here = pathlib.Path(__file__).parent
  arguments = ["--trust", "--model_dir", model_dir, "--input", "rows.txt"]
  arguments += ["--output", output]
  with subprocess.Popen(
    [sys.executable, "-m", "rosetta_t5.cli", "infer", *arguments],
    cwd=tmp_path,
    text=True,
    env={**os.environ, "PYTHONPATH": f"{here}:{here.parent}", "JAX_PLATFORMS": "cpu"},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  ) as process:
    if output == "-":
      assert json.loads(process.stdout.readline())["inputs"] == "text 0"
      process.stdout.close()  # as `head -1` does
    else:
      wait_for_results(tmp_path / output, process)
      process.send_signal(signal.SIGINT)
    printed, status = process.stderr.read(), process.wait(60)
  assert "Traceback" not in printed
  if output == "-":
    assert status == 128 + signal.SIGPIPE
    return
  assert status == -signal.SIGINT
  rows = [json.loads(line)["inputs"] for line in (tmp_path / output).read_text().splitlines()]
  assert rows == [f"text {n}" for n in range(len(rows))]


def wait_for_results(path, process):
  end = time.monotonic() + 300
  while not (path.exists() and path.read_text().count("\n") > 8):
    assert process.poll() is None
    assert time.monotonic() < end
    time.sleep(0.1)


def test_an_output_that_cannot_be_written_is_refused_before_the_model_is_opened(tmp_path, capfd):
  (tmp_path / "rows.txt").write_text("a text\n")
  os.mkfifo(tmp_path / "pipe")
  for output in ("absent/out.jsonl", ".", "pipe"):
    with pytest.raises(SystemExit):
      infer("no model", "--input", tmp_path / "rows.txt", "--output", tmp_path / output)
    assert "must be a file in a folder that exists" in capfd.readouterr().err


def test_without_a_model_no_output_is_created(tmp_path, capfd):
  (tmp_path / "rows.txt").write_text("a text\n")
  (tmp_path / "run").mkdir()
  for folder, why in (("rum", "(did you mean 'run'?)"), ("run", "the folder is empty")):
    with pytest.raises(SystemExit):
      infer(tmp_path / folder, "--input", tmp_path / "rows.txt", "--output", tmp_path / "out")
    assert why in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_template_that_does_not_fit_a_row_is_refused(model_dir, rows_file, capfd):
  with pytest.raises(SystemExit):
    infer(model_dir, "--input", rows_file, "--template", "{question.size}")
  assert (
    f"Line 1 of {rows_file} cannot be used: no column 'question.size' (did you mean 'question'?) among"
    in capfd.readouterr().err
  )


@pytest.mark.parametrize("there", ["my notes", "my notes\n", '{"answer": 1}\n', "[1]\n"])
def test_a_file_that_is_not_an_output_is_not_changed(model_dir, rows_file, tmp_path, capfd, there):
  output = tmp_path / "notes.txt"
  output.write_text(there)
  with pytest.raises(SystemExit):
    infer(model_dir, "--input", rows_file, "--template", "{question}", "--output", output)
  assert f"--output {output} exists and is not an output of this command" in (
    capfd.readouterr().err
  )
  assert output.read_text() == there


def test_chat_fills_blanks_until_an_empty_line(model_dir, monkeypatch, capfd):
  typed = io.BytesIO(b"no blank \xff\nthe ____ is\n\nnot reached")
  monkeypatch.setattr("sys.stdin", io.TextIOWrapper(typed, encoding="utf-8"))
  assert cli.main(["chat", str(model_dir), "--trust", "--bad_word=x"]) == 0
  printed = capfd.readouterr().out
  assert "There is no blank to fill" in printed
  assert "must be at most 0, the extra_ids of the model's vocabulary, got 1" in printed
  assert printed.count("> ") == 3
