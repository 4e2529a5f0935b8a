"""`rosetta-t5 finetune`: a folder and rows become a recipe that says why, and a run that can be repeated."""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys

import gin
import numpy as np
import pytest
import transformers_texts
from hub_server import serve
from test_folder_runs import VOCABULARY, make_folder
from test_run import logged

from rosetta_t5 import checkpoints, cli
from rosetta_t5.cli.command import Parser
from rosetta_t5.cli.finetune import choices
from rosetta_t5.cli.finetune.command import add_arguments
from rosetta_t5.cli.finetune.methods import METHODS, RATE
from rosetta_t5.cli.finetune.rows import Files
from rosetta_t5.data.tensorflow_import import seqio

ROWS = 120
OF_FILES = ("inputs", "targets", "eval", "metrics")


def call(*arguments):
  """Returns the exit status, standard output and standard error of a command."""
  out, errors = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
    try:
      status = cli.main([str(argument) for argument in arguments])
    except SystemExit as end:
      status = end.code
    finally:
      gin.clear_config()
      if "rows" in seqio.TaskRegistry.names():  # the next call has other rows of this name
        seqio.TaskRegistry.remove("rows")
  return status, out.getvalue(), errors.getvalue()


def settings_of(text):
  """Returns {name: value as text} of a gin file; later lines win."""
  return dict(re.findall(r"^([\w./]+) = (.*?)(?:  # .*)?$", text, re.MULTILINE))


def losses(folder):
  """Returns {step: loss} of a run."""
  name = "loss_per_nonpadding_target_token"
  return {step: values[name] for step, values in logged(folder).items() if name in values}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
  """Returns a folder with a model and a csv file, whose labels are the parity of its words' number."""
  root = tmp_path_factory.mktemp("given")
  random = np.random.default_rng(0)
  with (root / "rows.csv").open("w", newline="") as file:
    rows = csv.writer(file)
    rows.writerow(["text", "label", "count"])
    for number in range(ROWS):
      words = [f"w{n}" for n in random.integers(8, VOCABULARY, random.integers(5, 12))]
      rows.writerow([" ".join(words), f"w{4 + number % 2}", len(words)])
  make_folder(root / "model", "t5gemma", layers=1)
  make_folder(root / "decoder", "gemma3")
  return root


@pytest.fixture(scope="module")
def finished(given, tmp_path_factory):
  """Returns (the arguments of the command, the folder of its finished run, what it printed)."""
  folder = tmp_path_factory.mktemp("finished") / "run"
  columns = ("--inputs", "text", "--targets", "label")
  arguments = (
    "finetune",
    given / "model",
    given / "rows.csv",
    *columns,
    "--epochs",
    1,
    "--out",
    folder,
  )
  arguments += ("--batch_size", 16, "--gin.train_script.train.stats_period=1")
  status, out, errors = call(*arguments)
  assert status == 0, errors[-2000:]
  return arguments, folder, out


@pytest.mark.slow
def test_the_recipe_has_each_choice_with_its_reason(finished):
  _, folder, _ = finished
  text = (folder / "finetune.gin").read_text()
  chosen = settings_of(text)
  assert chosen["network.T5Config.dtype"] == "'float32'"
  assert chosen["TASK_FEATURE_LENGTHS"] == "{'inputs': 16, 'targets': 8}"
  assert "0.0% of the inputs truncated" in text
  assert chosen["data.file_task.metrics"] == "['accuracy', 'macro_f1']"
  assert chosen["train_script.train.stats_period"] == "1"
  assert chosen["train_script.train.concurrent_metrics"] == "False"
  assert re.search(r"validation_percent = 10.0  # \d+ rows that are never trained on", text)


def test_the_predictions_of_the_last_evaluation_are_of_rows_that_were_not_trained_on(
  finished, given
):
  _, folder, _ = finished
  last = max((folder / "inference_eval").glob("rows-0*.jsonl"))
  evaluated = [
    json.loads(line)["input"]["inputs_pretokenized"] for line in last.read_text().splitlines()
  ]
  assert 0 < len(evaluated) < ROWS / 4
  text = (folder / "finetune.gin").read_text()
  assert f"{len(evaluated)} rows that are never trained on; {ROWS - len(evaluated)} are" in text


@pytest.mark.slow
def test_rows_in_a_file_get_the_predictions_of_the_runs_own_evaluation(finished, tmp_path):
  _, folder, _ = finished

  def predictions(name, *options):
    out = tmp_path / name
    status, _, errors = call("eval", "--model_dir", folder, *options, "--output_dir", out)
    assert status == 0, errors
    (file,) = out.glob("inference_eval/*-0*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]

  own = predictions("own")
  with (tmp_path / "rows.csv").open("w", newline="") as file:
    rows = csv.writer(file)
    rows.writerow(["text", "label"])
    rows.writerows([r["input"][f"{n}_pretokenized"] for n in ("inputs", "targets")] for r in own)
  of_file = predictions("file", "--file", tmp_path / "rows.csv")
  assert [row["prediction"] for row in of_file] == [row["prediction"] for row in own]


@pytest.mark.slow
def test_the_commands_that_it_suggests_run(finished, given, tmp_path):
  _, _, out = finished
  suggested = re.search(r"rosetta-t5 (infer .*) --input new_rows.jsonl", out)[1].split()
  status, predictions, errors = call(*suggested, "--input", given / "rows.csv")
  assert status == 0, errors
  assert len(predictions.splitlines()) == ROWS
  converted = re.search(r"rosetta-t5 (convert \S+)", out)[1].split()
  assert call(*converted, tmp_path / "hf", "--to", "hf")[0] == 0
  assert (tmp_path / "hf/model.safetensors").exists()


@pytest.mark.slow
def test_the_recipe_repeats_the_run_with_equal_losses(finished, tmp_path):
  _, folder, _ = finished
  flags = (f"--gin_file={folder / 'finetune.gin'}", f"--gin.MODEL_DIR={str(tmp_path / 'again')!r}")
  status, _, errors = call("train", *flags)
  assert status == 0, errors
  first, again = losses(folder), losses(tmp_path / "again")
  assert len(first) > 4
  assert first == again


@pytest.mark.slow
def test_an_interrupted_run_continues_with_the_losses_of_an_undisturbed_one(finished, tmp_path):
  _, folder, _ = finished
  flags = (f"--gin_file={folder / 'finetune.gin'}", f"--gin.MODEL_DIR={str(tmp_path / 'part')!r}")
  for end in (("--gin.TRAIN_STEPS=4",), ()):
    status, _, errors = call("train", *flags, *end)
    assert status == 0, errors
  assert max(losses(folder)) > 4
  assert losses(folder) == losses(tmp_path / "part")


@pytest.mark.slow
def test_the_same_command_continues_and_other_settings_are_refused(finished):
  arguments, folder, _ = finished
  before = (folder / "finetune.gin").read_text()
  status, _, errors = call(*arguments)
  assert status == 0, errors
  status, _, errors = call(*arguments, "--seed", 5, "--learning_rate", 0.01)
  assert status == 2
  assert "RANDOM_SEED: 0 → 5" in errors
  assert "base_learning_rate: 0.001 → 0.01" in errors
  assert "BATCH_SIZE" not in errors
  assert (folder / "finetune.gin").read_text() == before


@pytest.mark.slow
def test_a_run_is_finetuned_with_its_model_and_without_its_data(finished, given, tmp_path):
  folder = tmp_path / "run"
  shutil.copytree(finished[1], folder)
  latest = checkpoints.latest_step(folder)
  # A later checkpoint whose predictions were not evaluated: the other one is the best.
  shutil.copytree(folder / f"checkpoint_{latest}", folder / f"checkpoint_{latest + 1}")
  columns = ("--inputs", "{text} {count}", "--targets", "text", "--out", tmp_path / "next")
  status, out, errors = call(
    "finetune",
    folder,
    given / "rows.csv",
    *columns,
    "--patience",
    2,
    "--input_length",
    8,
    "--dry_run",
  )
  assert status == 0, errors
  chosen = settings_of(out)
  assert re.search(r"note: .* [1-9]\S*% of the inputs truncated", errors)
  assert re.search(r"note: TRAIN_STEPS = 200: \S+ epochs; 3 epochs would be only \d+ steps", errors)
  assert errors.count(f"checkpoint_{latest} is the best of the run, with accuracy") == 1
  assert chosen["INITIAL_CHECKPOINT_PATH"] == f"'{folder}/checkpoint_{latest}'"
  # It is also said once by a command that looks for the template of the run first.
  _, _, errors = call("infer", "--model_dir", folder, "--input", given / "rows.csv")
  assert errors.count("is the best of the run") == 1
  assert chosen["data.file_task.metrics"] == "['squad']"
  assert chosen["trainer.EarlyStoppingAction.metric"] == "('rows', 'f1')"
  assert "stats_period" not in out
  assert not (tmp_path / "next").exists()


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in METHODS if name != "bitfit"])
def test_a_method_has_its_adapter_its_rate_and_the_bindings_that_options_name(
  given, tmp_path, method
):
  arguments = (given / "model", given / "rows.csv", "--inputs", "text", "--targets", "label")
  arguments += ("--eval", given / "rows.csv", "--patience", 2)
  value = [7] if METHODS[method].argument else []
  status, out, errors = call(
    "finetune", *arguments, "--out", tmp_path / "run", "--dry_run", f"--{method}", *value
  )
  assert status == 0, errors
  chosen, adapter = settings_of(out), METHODS[method].adapter
  assert float(chosen[RATE]) == METHODS[method].rate
  assert chosen.get("models.EncoderDecoderModel.adapter") == (
    f"@adapters.{adapter}()" if adapter else None
  )
  if value:
    assert chosen[f"adapters.{adapter}.{METHODS[method].argument}"] == "7"
  parser = Parser()
  add_arguments(parser)
  for action in parser._actions:
    if action.dest not in {"help", "dry_run", "trust_model", *METHODS} - {method}:
      bindings = re.findall(r"[A-Z_]{5,}|[\w/]+(?:\.\w+)+", action.help.rpartition("(")[2])
      assert bindings, action.dest
      assert all(binding in out for binding in bindings), action.dest


@pytest.mark.slow
def test_lora_is_chosen_where_full_finetuning_does_not_fit(given, tmp_path, monkeypatch):
  arguments = (given / "model", given / "rows.csv", "--inputs", "text", "--targets", "label")
  arguments += ("--out", tmp_path / "run", "--dry_run", "--batch_size", 8)
  status, out, errors = call("finetune", *arguments)
  assert status == 0, errors
  assert "models.EncoderDecoderModel.adapter" not in settings_of(out)
  number, unit = re.search(r"# (\S+) (k|M)B of the device's", out).groups()
  needed = float(number) * {"k": 1e3, "M": 1e6}[unit]
  # Half of a CPU's memory is used, and parameters, gradients and activations each need about a third.
  monkeypatch.setattr("rosetta_t5.out_of_memory.device_memory", lambda: 2 * 0.6 * needed)
  status, out, errors = call("finetune", *arguments)
  assert status == 0, errors
  assert settings_of(out)["models.EncoderDecoderModel.adapter"] == "@adapters.LoRA()"
  assert "chosen because full finetuning does not fit the memory" in out


@pytest.mark.slow  # a minute; quick tests train adapters from gin files, and convert them
def test_an_adapter_is_trained_used_and_merged(given, tmp_path):
  arguments = (given / "model", given / "rows.csv", "--inputs", "text", "--targets", "label")
  flags = ("--out", tmp_path / "run", "--lora", 4, "--steps", 3, "--batch_size", 8)
  status, out, errors = call("finetune", *arguments, *flags)
  assert status == 0, errors[-2000:]
  suggested = re.search(r"rosetta-t5 (convert \S+)", out)[1].split()
  assert call(*suggested, tmp_path / "hf", "--to", "hf")[0] == 0
  assert (tmp_path / "hf/model.safetensors").exists()
  status, _, errors = call("finetune", tmp_path / "run", *arguments[1:], "--out", tmp_path / "more")
  assert status == 2
  assert "has an adapter: merge it" in errors


@pytest.mark.slow
def test_a_decoder_reads_inputs_and_targets_as_one_row(given, tmp_path):
  arguments = (given / "decoder", given / "rows.csv", "--inputs", "text", "--targets", "label")
  status, out, errors = call("finetune", *arguments, "--out", tmp_path, "--dry_run")
  assert status == 0, errors
  reader = settings_of(out)["models.DecoderOnlyModel.feature_converter_cls"]
  assert reader == "@seqio.PrefixLMFeatureConverter"


@pytest.mark.slow
def test_a_finetuned_decoder_predicts_the_same_from_the_folder_that_is_converted(given, tmp_path):
  arguments = (given / "decoder", given / "rows.csv", "--inputs", "text", "--targets", "label")
  run, folder, found = tmp_path / "run", tmp_path / "folder", []
  options = ("--steps", 3, "--batch_size", 8, "--metrics", "accuracy", "--out", run)
  assert call("finetune", *arguments, *options)[0] == 0
  assert call("convert", run, folder, "--to", "hf")[0] == 0
  for model in (run, folder):
    options = ("--input", given / "rows.csv", "--template", "text", "--output_length", 8)
    output = tmp_path / f"{model.name}.jsonl"
    status, _, errors = call("infer", "--model_dir", model, *options, "--output", output)
    assert status == 0, errors
    found.append([json.loads(line)["prediction"] for line in output.read_text().splitlines()])
  assert len(found[0]) == ROWS
  assert found[0] == found[1]


@pytest.mark.slow
def test_a_umt5_whose_layers_have_biases_of_their_own_takes_an_adapter(given, tmp_path):
  transformers_texts.write_folder("5.24.0/umt5", tmp_path / "model")
  columns = ("--inputs", "text", "--targets", "label")
  arguments = (tmp_path / "model", given / "rows.csv", *columns, "--out", tmp_path / "out")
  status, out, errors = call("finetune", *arguments, "--lora", 4, "--dry_run")
  assert status == 0, errors
  assert settings_of(out)["network.T5Config.bias_per_layer"] == "True"


def test_the_splits_of_a_folder_are_trained_on_and_evaluated(given, tmp_path):
  for split in ("train", "validation", "test"):
    (tmp_path / "rows" / split).mkdir(parents=True)
    file = tmp_path / "rows" / split / "part.csv"
    file.write_text((given / "rows.csv").read_text())
  arguments = (given / "model", tmp_path / "rows", "--inputs", "text", "--targets", "label")
  status, out, errors = call("finetune", *arguments, "--out", tmp_path / "out", "--dry_run")
  assert status == 0, errors
  chosen = settings_of(out)
  assert chosen["data.file_task.files"] == f"['{tmp_path}/rows/train/part.csv']"
  assert chosen["data.file_task.validation_files"] == f"['{tmp_path}/rows/validation/part.csv']"
  assert "data.file_task.validation_percent" not in chosen


def test_a_wrong_binding_of_the_user_is_reported_before_the_recipe_is_written(given, tmp_path):
  arguments = (given / "model", given / "rows.csv", "--inputs", "text", "--targets", "label")
  flags = ("--out", tmp_path / "run", "--gin.TRAIN_STEP=4")
  status, _, errors = call("finetune", *arguments, *flags)
  assert status == 2
  assert "Did you mean TRAIN_STEPS?" in errors
  assert not (tmp_path / "run").exists()


def test_a_batch_that_the_devices_cannot_share_is_refused(given, tmp_path):
  arguments = (given / "model", given / "rows.csv", "--inputs", "text", "--targets", "label")
  status, _, errors = call("finetune", *arguments, "--out", tmp_path / "run", "--batch_size", 3)
  assert status == 1
  assert "batch size 3" in errors.lower()


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_refused_and_a_small_memory_means_microbatches(
  given, tmp_path, monkeypatch
):
  arguments = (given / "model", given / "rows.csv", "--inputs", "text", "--targets", "label")
  flags = ("--out", tmp_path / "run", "--batch_size", 64, "--dry_run")
  memory = "rosetta_t5.out_of_memory.device_memory"
  monkeypatch.setattr(memory, lambda: 1.2e6)
  status, out, errors = call("finetune", *arguments, *flags)
  assert status == 0, errors
  assert int(settings_of(out)["trainer.Trainer.num_microbatches"]) > 1
  monkeypatch.setattr(memory, lambda: 1e4)
  status, _, errors = call("finetune", *arguments, *flags)
  assert status == 2
  assert "the model does not fit" in errors


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["squad_v010_context_free"]])
def test_known_tasks_have_the_vocabulary_of_the_model(given, tmp_path, more):
  (tmp_path / "data/squad").mkdir(parents=True)
  answers = {"question": "w9 ?", "id": "1", "answers": [{"text": "w7", "answer_start": 0}]}
  articles = [{"title": "w8", "paragraphs": [{"context": "w7 w9", "qas": [answers] * 40}]}]
  for split in ("train", "dev"):
    (tmp_path / f"data/squad/{split}-v1.1.json").write_text(json.dumps({"data": articles}))
  name = "squad_v010_allanswers"
  flags = ("--out", tmp_path / "run", "--dry_run", f"--tfds_data_dir={tmp_path / 'data'}")
  status, out, errors = call("finetune", given / "model", name, *more, *flags)
  assert status == 0, errors
  chosen = settings_of(out)
  assert chosen[f"{name}/data.known_task.vocabulary"] == "%VOCABULARY"
  data = "@data.mixture()" if more else f"@{name}/data.known_task()"
  assert chosen["MIXTURE_OR_TASK_NAME"] == data
  monitored = "training_eval" if more else f"inference_eval/{name}_own_vocabulary/eval/f1"
  assert monitored in chosen["checkpoints.SaveBestCheckpointer.metric_name_to_monitor"]


@pytest.mark.parametrize(
  ("file", "content", "options", "message"),
  [
    ("rows.csv", "text,label\na,b\n", "--inputs txt", "no column 'txt' (did you mean 'text'?)"),
    ("rows.csv", "text,label\na,b\n", "--inputs {text", "is not a valid template"),
    ("rows.csv", "text,label\na,b\n", "--inputs {txet}", "no column 'txet' (did you mean 'text'?)"),
    ("rows.csv", "text,label\na,b\n", "--metrics acuracy", "(did you mean 'accuracy'?)"),
    ("rows.csv", "text,label\na,b\n", "--eval rowz.csv", "rowz.csv' (did you mean 'rows.csv'?)"),
    ("rows.csv", "text,label\na,b\n", "--steps 3 --epochs 2", "both set TRAIN_STEPS"),
    ("rows.csv", "text,label\n", "", "contains no rows"),
    ("rows.csv", "text,label\na,\n", "", "label is empty"),
    ("rows.csv", "text:label\na:b\n", "", "no column 'text' among 'text:label'"),
    ("rows.csv", "text;text;label\na;b;c\n", "", "has two columns 'text': rename one"),
    ("rows.parquet", "text,label\n", "", "the file is damaged"),
    ("rows.jsonl", '{"text": {"a": 1}, "label": "b"}\n', "", "text is an object, not text"),
    ("row.jsonl", "", "", "did you mean 'row.jsonl'?"),
    ("rowz.csv", "", "", "/rows' (did you mean 'rowz.csv'?)"),
  ],
)
def test_a_mistake_in_the_data_is_reported_before_the_model_is_read(
  tmp_path, monkeypatch, caplog, file, content, options, message
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / file).write_text(content)
  data = {"row.jsonl": "rows.jsonl", "rowz.csv": "rows"}.get(file, file)
  columns = ("--inputs", "text", "--targets", "label", "--out", "out")
  status, _, errors = call("finetune", "no_model", data, *columns, *options.split())
  assert status == 2
  assert message in errors
  assert message not in caplog.text  # it is printed once
  assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_model_in_the_place_of_the_data_is_an_error_that_says_so(given, tmp_path):
  status, _, errors = call("finetune", given / "rows.csv", given / "model", "--out", tmp_path)
  assert status == 2
  assert f"DATA {given / 'model'} is the folder of a model: give it first, as MODEL" in errors


def test_a_model_of_the_hub_is_downloaded_once_and_a_wrong_name_is_reported(given, tmp_path):
  def finetune(model, out, **environment):
    # The library reads its settings when it is imported.
    code = (
      f"import sys; sys.path[:] = {sys.path!r}; from rosetta_t5 import cli; sys.exit(cli.main())"
    )
    steps = ("--steps", "2", "--batch_size", "8", "--out", str(tmp_path / out))
    command = (model, str(given / "rows.csv"), "--inputs", "text", "--targets", "label", *steps)
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), **environment}
    return subprocess.run(
      [sys.executable, "-c", code, "finetune", *command],
      env=environment,
      capture_output=True,
      text=True,
    )

  with serve("an-owner/tiny", given / "model") as (address, requested):
    wrong = finetune("an-owner/tyni", "wrong", HF_ENDPOINT=address)
    assert wrong.returncode == 1
    assert "hub has no model of this name for you: correct the name" in wrong.stderr
    first = finetune("an-owner/tiny", "first", HF_ENDPOINT=address)
    assert first.returncode == 0, first.stderr[-2000:]
  assert sorted(requested) == sorted(os.listdir(given / "model"))
  second = finetune("an-owner/tiny", "second", HF_HUB_OFFLINE="1")
  assert second.returncode == 0, second.stderr[-2000:]
  assert checkpoints.latest_step(tmp_path / "first") == 2
  assert checkpoints.latest_step(tmp_path / "second") == 2


def test_without_a_network_the_error_says_how_to_bring_a_folder(given, tmp_path, monkeypatch):
  monkeypatch.setenv("HF_HUB_OFFLINE", "1")
  monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
  arguments = (given / "rows.csv", "--inputs", "text", "--targets", "label", "--out", tmp_path)
  status, _, errors = call("finetune", "nobody/t5-tiny", *arguments)
  assert status == 1
  assert "hf download nobody/t5-tiny --local-dir t5-tiny" in errors


LABELS = ["yes", "no", "yes", "maybe"] * 10
ANSWERS = [f"the {n}th of May" for n in range(40)]
TEXTS = [" ".join([f"word{n}"] * 30) for n in range(40)]


@pytest.mark.parametrize(
  ("targets", "metrics", "monitored"),
  [
    (LABELS, ["accuracy", "macro_f1"], "accuracy"),
    (ANSWERS, ["squad"], "f1"),
    (TEXTS, ["rouge"], "rougeLsum"),
    ((), [], "loss_per_nonpadding_target_token"),
  ],
)
def test_the_metrics_are_those_of_the_kind_of_targets(targets, metrics, monitored):
  if metrics == ["rouge"]:
    pytest.importorskip("rouge_score")
  choice, monitor = choices.choose_metrics(targets, (), "task")
  assert (choice.value, monitor.name) == (metrics, monitored)


def test_a_length_keeps_the_longest_row_unless_a_few_are_much_longer():
  even, skewed = np.arange(1, 101), np.array([*range(1, 300)] * 2 + [5000])
  found = choices.choose_lengths(
    {"inputs": skewed, "targets": even}, {"inputs": None, "targets": None}, None
  )
  assert found.value["targets"] == 104
  assert 290 <= found.value["inputs"] <= 304
  assert "0.7% of the inputs truncated" in found.reason or "0.2% of the inputs" in found.reason
  given = choices.choose_lengths({"inputs": even}, {"inputs": 50}, None)
  assert given.value == {"inputs": 50}
  assert "50.0% of the inputs truncated" in given.reason


@pytest.mark.parametrize(
  ("rows", "given", "batch", "steps"),
  [(100_000, {}, 64, 4689), (100, {}, 8, 200), (100, {"epochs": 2, "batch_size": 10}, 10, 20)],
)
def test_steps_are_epochs_of_the_rows_unless_they_would_be_too_few(rows, given, batch, steps):
  options = argparse.Namespace(**({"batch_size": None, "steps": None, "epochs": None} | given))
  found = choices.choose_steps(rows, options, 1, "GPU")
  assert [choice.value for choice in found[:2]] == [batch, steps]


def sized(rows, devices, **given):
  options = argparse.Namespace(**{"batch_size": None, "steps": None, "epochs": None, **given})
  return choices.choose_steps(rows, options, devices, "GPU")


@pytest.mark.parametrize(
  ("rows", "devices", "size"),
  [(1300, 1, 64), (1300, 8, 64), (100, 1, 8), (10**6, 8, 512), (50, 6, 12)],
)
def test_the_batch_is_shared_by_the_devices_and_an_epoch_has_some_steps(rows, devices, size):
  batch, steps, _ = sized(rows, devices)
  assert batch.value == size
  assert f"an epoch has {-(-rows // size)} steps" in batch.reason
  assert steps.value >= 200


def test_the_lowest_perplexity_is_the_best():
  _, monitor = choices.choose_metrics((), ["word_perplexity"], "task")
  assert (monitor.name, monitor.mode) == ("perplexity", "min")


def test_files_of_a_folder_are_splits_by_their_names(tmp_path):
  for name in ("squad_train.csv", "squad_valid.csv", "trainers.csv"):
    (tmp_path / name).write_text("inputs,targets\na,b\n")
  data = Files(argparse.Namespace(data=[str(tmp_path)], **dict.fromkeys(OF_FILES)))
  assert [*map(os.path.basename, data.arguments["files"])] == ["squad_train.csv"]
  assert [*map(os.path.basename, data.arguments["validation_files"])] == ["squad_valid.csv"]
