"""`rosetta-t5 eval` and `infer` with the folder of a training run alone, and options that need it."""

from __future__ import annotations

import json
import re
import shutil

import gin
import numpy as np
import pytest
import tiny_tasks
from inline_executor import InlineExecutor
from tiny_tasks import add_task, save_checkpoints

from rosetta_t5 import cli, trained_model
from rosetta_t5.checkpoints import RestoreCheckpointConfig
from rosetta_t5.config import model_file, run_from_command_line
from rosetta_t5.data import DatasetConfig
from rosetta_t5.data.prepared import prepare
from rosetta_t5.data.tensorflow_import import import_seqio
from rosetta_t5.data.vocabularies.sentencepiece_models import train_sentencepiece
from rosetta_t5.eval import evaluate
from rosetta_t5.export.functions import load_stablehlo
from rosetta_t5.export.saved_model import save

CONFIG = """
from __gin__ import dynamic_registration
import __main__ as train_script
import tiny_tasks
from t5x import decoding
from t5x import partitioning
from t5x import trainer
from t5x import utils

train_script.train:
  model = @tiny_tasks.byte_model()
  partitioner = @partitioning.PjitPartitioner()
  trainer_cls = @trainer.Trainer
  eval_steps = 1
  train_dataset_cfg = @train/utils.DatasetConfig()
  train_eval_dataset_cfg = @train_eval/utils.DatasetConfig()
  infer_eval_dataset_cfg = @infer_eval/utils.DatasetConfig()
partitioning.PjitPartitioner.num_partitions = 1
utils.DatasetConfig:
  mixture_or_task_name = 'judged_pairs'
  task_feature_lengths = {'inputs': 16, 'targets': 12}
  split = 'validation'
  batch_size = 8
  shuffle = False
  seed = 0
  pack = True
train/utils.DatasetConfig.split = 'train'
infer_eval/utils.DatasetConfig.task_feature_lengths = None
"""


def likelihood(targets, scores):
  return {"likelihood": float(scores.mean())}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
  add_task("judged_pairs", metric_fns=[likelihood])
  add_task("unjudged_pairs")
  folder = tmp_path_factory.mktemp("run")
  save_checkpoints(folder, [3, 7])
  (folder / "config.gin").write_text(CONFIG)
  yield folder
  for task in ("judged_pairs", "unjudged_pairs"):
    import_seqio().TaskRegistry.remove(task)


@pytest.fixture(autouse=True)
def empty_gin(monkeypatch):
  monkeypatch.setattr("rosetta_t5.parallel.process_settings.enable_compilation_cache", lambda: None)
  yield
  gin.clear_config()


@pytest.mark.slow
def test_eval_evaluates_the_runs_task_with_its_last_checkpoint(model_dir, capsys):
  assert cli.main(["eval", "--model_dir", str(model_dir), "--trust"]) == 0
  shown = capsys.readouterr().out
  assert "judged_pairs  step  examples  likelihood\n" in shown
  folder = model_dir / "eval/validation/inference_eval"
  assert f"results  {folder}" in shown
  (line,) = (folder / "judged_pairs-metrics.jsonl").read_text().splitlines()
  assert json.loads(line)["step"] == 7


@pytest.mark.slow
def test_eval_of_a_task_without_metrics_evaluates_the_loss_of_the_given_checkpoint(
  model_dir, tmp_path, capsys
):
  options = ["--task", "unjudged_pairs", "--split", "test", "--output_dir", str(tmp_path / "out")]
  options += ["--trust"]
  assert cli.main(["eval", "--model_dir", str(model_dir / "checkpoint_3"), *options]) == 0
  shown = capsys.readouterr().out
  assert "1 batches of the split 'test'" in shown
  assert "evaluation at step 3  unjudged_pairs  loss " in shown
  assert list((tmp_path / "out").rglob("events*"))


@pytest.mark.slow
def test_eval_evaluates_all_rows_of_a_file_and_states_their_number(
  model_dir, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "new").mkdir()
  (tmp_path / "new/rows.csv").write_text(
    "a,b\n" + "".join(f"question {n},{n}\n" for n in range(21))
  )
  options = ["--model_dir", str(model_dir), "--trust", "--file", "new/rows.csv"]
  assert cli.main(["eval", *options, "--inputs", "{a}?", "--targets", "b"]) == 0
  shown = capsys.readouterr().out
  assert "new_rows.csv  step  examples  accuracy\n" in shown
  line = json.loads((model_dir / "eval/new_rows.csv/results.jsonl").read_text())
  assert line.pop("accuracy") >= 0
  assert line.pop("checkpoint") == str(model_dir / "checkpoint_7")
  assert line == {"step": 7, "task": "new_rows.csv", "split": "validation", "examples": 21}
  (tmp_path / "other.csv").write_text("a,b\n1,2\n")
  with pytest.raises(SystemExit):
    cli.main(["eval", *options[:-1], "other.csv", "--inputs", "{a}", "--targets", "c"])
  assert "no column 'c' among 'a', 'b'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("is_prepared", [False, True])
def test_the_loss_of_a_file_does_not_depend_on_the_batch_size(
  is_prepared, model_dir, tmp_path, capsys, isolated_registries
):
  run, rows = tmp_path / "run", tmp_path / "rows.txt"
  shutil.copytree(model_dir, run)
  rows.write_text("".join(f"a text {n**5}\n" for n in range(17)))
  task = f"""
data.file_task.files = '{rows}'
data.file_task.objective = 'prefix_lm'
data.file_task.vocabulary = @seqio.ByteVocabulary()
data.file_task.validation_percent = 0
"""
  if is_prepared:
    vocabulary = tmp_path / "pieces.model"
    vocabulary.write_bytes(train_sentencepiece([rows.read_text()] * 20, vocab_size=18))
    prepare(str(rows), str(vocabulary), tmp_path / "tokens", executor=InlineExecutor())
    folder = f"data.prepared_task.folders = '{tmp_path / 'tokens'}'\n"
    task = f"{folder}data.prepared_task.objective = 'prefix_lm'\n"
  function = "prepared_task" if is_prepared else "file_task"
  config = CONFIG.replace("'judged_pairs'", f"@data.{function}()") + task
  (run / "config.gin").write_text(
    config.replace(
      "import tiny_tasks", "import seqio\nimport tiny_tasks\nfrom rosetta_t5 import data"
    )
  )
  losses = set()
  for size in ("8", "16"):
    options = ["--batch_size", size, "--output_dir", str(tmp_path / size), "--trust"]
    assert cli.main(["eval", "--model_dir", str(run), "--file", str(rows), *options]) == 0
    shown = capsys.readouterr().out
    assert "all batches of the split" in shown
    losses.add(re.search(r"loss \S+", shown)[0])
  assert len(losses) == 1


@pytest.mark.slow
def test_infer_writes_the_predictions_of_the_runs_task(model_dir, capsys):
  decode = "--gin.tiny_tasks.byte_model.label_smoothing=0.1"  # a binding changes the run
  options = ["--split=test", decode, "--trust"]
  assert cli.main(["infer", "--model_dir", str(model_dir), *options]) == 0
  path = model_dir / "infer/test/checkpoint_7/judged_pairs-predict.jsonl-00000-of-00001"
  assert f"results  {path}" in capsys.readouterr().out
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  assert len(rows) == 11
  assert {type(row["prediction"]) for row in rows} == {str}


@pytest.mark.slow
def test_infer_has_a_mode_and_decoding_options_for_the_runs_task(model_dir, tmp_path, capsys):
  options = ["--split=test", "--trust", "--output_dir", str(tmp_path)]

  def rows_of(mode, *more):
    call = ["infer", "--model_dir", str(model_dir), *options, "--mode", mode, *more]
    assert cli.main(call) == 0
    (file,) = tmp_path.glob(f"*-{mode}.jsonl-00000-of-00001")
    return [json.loads(line) for line in file.read_text().splitlines()]

  assert all(row["score"] < 0 for row in rows_of("score"))
  rows = rows_of("predict_with_aux", "--min_new_tokens=12")
  assert all(row["aux"]["scores"] < 0 for row in rows)
  with pytest.raises(SystemExit):
    rows_of("predict_with_aux")
  assert "functools.partial(<function beam_search>, min_new_tokens=12) →" in capsys.readouterr().err


def test_decoding_options_change_the_model_of_a_run_that_model_json_describes(monkeypatch):
  lengths = {"inputs": 16, "targets": 12}
  cfg = DatasetConfig("judged_pairs", lengths, "test", batch_size=8, shuffle=False, seed=0)
  content = {
    "model": tiny_tasks.byte_model,
    "partitioner": object,
    "train_dataset_cfg": lambda: cfg,
  }
  run = model_file.ModelFile(None, content, is_complete=True)
  given, trained = {}, RestoreCheckpointConfig(path="run/checkpoint_7")
  monkeypatch.setattr(model_file, "_build", lambda build: build())
  monkeypatch.setattr(trained_model, "read_run", lambda *_: (run, trained))
  monkeypatch.setattr("rosetta_t5.infer.infer", lambda **arguments: given.update(arguments))
  assert cli.main(["infer", "--model_dir=run", "--output_dir=out", "--min_new_tokens=12"]) == 0
  assert given["model"].decode_fn.keywords == {"min_new_tokens": 12}


@pytest.mark.slow
def test_infer_refuses_the_results_of_other_bindings_of_the_decode_function(
  model_dir, tmp_path, capsys
):
  options = ["--split=test", "--trust", "--output_dir", str(tmp_path)]
  sample = "--gin.tiny_tasks.byte_model.decode_fn=@decoding.temperature_sample"

  def infer(temperature):
    bound = f"--gin.decoding.temperature_sample.temperature={temperature}"
    return cli.main(["infer", "--model_dir", str(model_dir), *options, sample, bound])

  assert infer(0.5) == infer(0.5) == 0
  assert "is complete: nothing was left to do" in capsys.readouterr().out
  with pytest.raises(SystemExit):
    infer(0.9)
  assert "{'temperature': 0.5} → <function temperature_sample>" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("arguments", "status", "message"),
  [
    ("eval --split test", 2, "error: --split needs --model_dir"),
    ("eval --metrics bleu", 2, "error: --metrics needs --model_dir"),
    ("infer --input a.txt", 2, "error: --input needs --model_dir"),
    ("infer --model_dir RUN --template x", 2, "error: --template needs --input"),
    ("infer --model_dir RUN --output x", 2, "error: --output needs --input"),
    ("infer --model_dir RUN --input a.txt --split test", 2, "error: --split needs a task"),
    ("eval --model_dir RUN --dry_run", 2, "--dry_run describes what gin files would run"),
    ("eval --model_dir RUN --trust --gin.NoSuch.x=1", 2, "NoSuch"),
    (
      "eval --model_dir RUN --trust --split tset",
      1,
      "(--split of eval and inspect, or MIXTURE_OR_TASK_SPLIT",
    ),
    ("eval --model_dir RUN --trust --split ../..", 2, "the split must be a name, got '../..'"),
    ("eval --model_dir RUN --trust --task nothing", 1, "nothing"),
    ("eval --model_dir RUN", 2, "the module 'tiny_tasks' is not imported"),
    (
      "eval --model_dir RUN/checkpoint_5",
      1,
      "There is no folder RUN/checkpoint_5 (did you mean 'checkpoint_",
    ),
    ("eval --model_dir nowhere", 1, "There is no folder nowhere: give"),
  ],
)
def test_options_that_cannot_be_used_are_refused(model_dir, arguments, status, message, capsys):
  with pytest.raises(SystemExit) as ended:
    cli.main([word.replace("RUN", str(model_dir)) for word in arguments.split()])
  assert ended.value.code == status
  assert message.replace("RUN", str(model_dir)) in capsys.readouterr().err


@pytest.mark.slow
def test_export_opens_a_run_and_writes_a_model_for_texts(model_dir, tmp_path, capsys):
  folder = tmp_path / "exported"
  arguments = ["--model_dir", str(model_dir), "--trust", "--output_length", "4"]
  with pytest.raises(SystemExit):
    cli.main(["export", *arguments])
  assert "--model_dir needs --output_dir" in capsys.readouterr().err
  assert cli.main(["export", *arguments, "--output_dir", str(folder), "--num_decodes", "2"]) == 0
  features = {
    "encoder_input_tokens": np.ones((3, 16), np.int32),
    "decoder_input_tokens": np.zeros((3, 4), np.int32),
    "decoder_target_tokens": np.zeros((3, 4), np.int32),
    "decoder_loss_weights": np.zeros((3, 4), np.int32),
  }
  decodes, scores = load_stablehlo(folder / "stablehlo")(features)
  assert (decodes.shape, scores.shape) == ((3, 2, 4), (3, 2))


def test_the_help_of_a_module_names_the_module(capsys):
  for module, function in (("export", save), ("eval", evaluate)):
    run_from_command_line(function, [f"t5x.{module}", "--help"])
    assert capsys.readouterr().out.startswith(f"usage: python -m t5x.{module} [")
