"""What a report knows of a run is read from the files in its folder, without executing any."""

from __future__ import annotations

import base64
import gzip
import json
import shutil

import pytest
import run_files

from rosetta_t5.run_report.contents import UNKNOWN, summarize, summary_row
from rosetta_t5.run_report.report_command import encode_data
from rosetta_t5.run_report.run_folder import parse_bindings, read_runs


def timeline_of(folder):
  data = json.loads(gzip.decompress(base64.b64decode(encode_data(read_runs([str(folder)])))))
  return data["runs"][0]["timeline"]


def test_starts_ends_and_checkpoints_are_found(runs):
  timeline = timeline_of(runs[0])
  log = [(event["kind"], event["step"], event["reason"]) for event in timeline["log"]]
  assert log == [
    ("start", 0, None),
    ("end", 300, "interrupted"),
    ("start", 300, None),
    ("start", 600, None),
    ("end", 1000, "finished"),
  ]
  assert [e["seconds"] for e in timeline["log"] if e["kind"] == "start"] == [1, 211, 421]
  saved = {one["step"]: one["kept"] for one in timeline["checkpoints"]}
  assert sorted(saved) == list(range(100, 1001, 100))
  assert [step for step, kept in saved.items() if kept] == [900, 1000]


def test_the_row_has_the_figures_of_the_run(runs):
  row = summary_row(read_runs([str(runs[0])])[0])
  assert row == {
    "Run": "first",
    "Size": "76.96\N{NO-BREAK SPACE}M",
    "GPU": "H100 80GB HBM3",
    "Precision": "bfloat16",
    "#GPUs": "8",
    "TP": "2",
    "BS / GPU": "256",
    "Sequences/s": "5,600",
    "Seq/s/GPU": "700",
    "Est. walltime": "4d05h",
    "GPU-days": "33.9",
    "MNLI (acc.)": "83.10",
    "SQuAD v1.1 (EM / F1)": "76.92 / 90.91",
    "Tags": "pile, small",
    "Notes": "a baseline",
  }


@pytest.mark.parametrize("notes", ["5", "{[]: 1}", "'a' +", "-" * 10_000 + "1", "(" * 10_000])
def test_a_row_has_no_notes_where_the_configuration_has_something_else(notes, runs, tmp_path):
  folder = shutil.copytree(runs[0], tmp_path / "run")
  config = folder / "config.gin"
  config.write_text(config.read_text().replace("NOTES = 'a baseline'", f"NOTES = {notes}"))
  row = summary_row(read_runs([str(folder)])[0])
  assert row["Notes"] == UNKNOWN
  assert row["Tags"] == "pile, small"


def test_the_summary_says_how_far_the_run_is_and_how_good(runs):
  run = read_runs([str(runs[0])])[0]
  run.config["MIXTURE_OR_TASK_NAME"] = "'squad_v010_allanswers'"
  summary = summarize(run, now=run.last_time)
  assert summary["sentence"] == (
    "Finished at step 1,000 of 1,000,000 after 10m19s; em of squad_v010_allanswers was best at step 1,000."
  )
  assert [(name, value) for name, value, _ in summary["numbers"]] == [
    ("State", "Finished"),
    ("em of squad_v010_allanswers", "76.92"),
    ("Time spent", "10m19s"),
    ("Sequences per second", "5,600"),
  ]


def test_a_run_without_an_end_is_training_until_it_is_silent(runs):
  run = read_runs([str(runs[0])])[0]
  run.log.pop()
  states = [summarize(run, run.last_time + wait)["numbers"][0][1] for wait in (60, 7200)]
  assert states == ["Training", "Ended without a record"]


def test_a_held_out_loss_is_best_where_it_is_lowest(runs):
  run = read_runs([str(runs[0])])[0]
  run.series = {name: tags for name, tags in run.series.items() if "inference" not in name}
  name, best, explanation = summarize(run, 0)["numbers"][1]
  assert (name, best, explanation) == ("held-out loss of c4", "2.559", "best; the last is 2.559")


def test_the_estimated_time_counts_only_the_steps_of_the_run(runs):
  run = read_runs([str(runs[0])])[0]
  for line in run.log:
    if line["event"] == "start":
      line["step"] = 500_000
  assert summary_row(run)["GPU-days"] == "16.9"


def test_a_percentage_below_one_is_not_taken_for_a_fraction(tmp_path):
  folder = run_files.write_run(tmp_path / "run")
  scores = [(step, {"eval/accuracy": value}) for step, value in ((2000, 34.5), (3000, 0.5))]
  run_files.add_event_file(folder / "inference_eval" / "glue_mnli_matched_v002", scores)
  row = summary_row(read_runs([str(folder)])[0])
  assert row["MNLI (acc.)"] == "0.50"


def test_a_folder_that_t5x_wrote_is_enough(tmp_path):
  """T5X writes no log; the ratio of its rates is the number of devices."""
  rows = run_files.training_metrics(range(10, 100, 10))
  run_files.add_event_file(tmp_path / "t5x_run" / "train", rows, as_tensors=False)
  (tmp_path / "t5x_run" / "config.gin").write_text("BATCH_SIZE = 128\nTRAIN_STEPS = 1000\n")
  run = read_runs([str(tmp_path / "t5x_run")])[0]
  row = summary_row(run)
  assert (row["#GPUs"], row["BS / GPU"], row["GPU"]) == ("8", "16", "–")


def test_predictions_are_read_with_their_targets(runs):
  samples = read_runs([str(runs[0])])[0].samples["squad_v010_allanswers"]
  assert sorted(samples) == [200, 1000]
  (_, target, prediction), *_ = samples[1000]
  assert (target, prediction) == ("Denver Broncos", "Denver Broncos")


def test_samples_of_tasks_without_files_of_predictions_are_read(runs, tmp_path):
  folder = shutil.copytree(runs[0], tmp_path / "run")
  sample = {"task": "text", "input": "a ____ c", "target": "b"}
  lines = [{**sample, "step": 7, "prediction": "x"}, {**sample, "step": 7, "prediction": "b"}, {}]
  (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  samples = read_runs([str(folder)])[0].samples
  assert samples["text"] == {7: [("a ____ c", "b", "x"), ("a ____ c", "b", "b")]}
  assert "squad_v010_allanswers" in samples


def test_runs_of_the_same_name_are_told_apart(runs, tmp_path):
  for parent in ("a", "b"):
    shutil.copytree(runs[0] / "train", tmp_path / parent / "run" / "train")
  folders = [str(tmp_path / name / "run") for name in ("a", "b", "a")]
  assert [run.name for run in read_runs(folders)] == ["a/run", "b/run"]


@pytest.mark.parametrize(
  "prepare",
  [
    lambda folder: None,
    lambda folder: folder.write_text("x"),
    lambda folder: folder.mkdir(),
    lambda folder: run_files.add_event_file(folder / "train", []),
    lambda folder: run_files.write_run(folder / "small"),
  ],
)
def test_a_folder_without_a_run_is_an_error(prepare, tmp_path):
  prepare(tmp_path / "run")
  with pytest.raises(ValueError, match="run contains no metrics of a run: give a MODEL_DIR"):
    read_runs([str(tmp_path / "run")])


def test_damaged_records_and_lines_are_left_out_and_the_rest_is_read(runs, tmp_path):
  folder = shutil.copytree(runs[0], tmp_path / "damaged")
  (events,) = (folder / "training_eval" / "c4").iterdir()
  events.write_bytes(events.read_bytes()[:-7])
  (folder / "run-log.jsonl").write_text(
    '{"event": "start", "mesh": 3, "devices": "x"}\n{"event": "end", "time": 1.5}\n[1]\n{"ev'
  )
  (folder / "model-info.txt").write_text("Variable\nTotal number of parameters: many\n")
  (folder / "inference_eval" / "task-000001.jsonl").write_text('{"input": null}\nnot json\n')
  run = read_runs([str(folder)])[0]
  assert run.log == [{"event": "end", "time": 1.5}]
  assert run.samples["task"] == {1: [("null", "", "")]}
  assert summary_row(run)["#GPUs"] == "8"


def test_the_text_of_a_gin_file_is_parsed_and_not_executed(tmp_path):
  text = f"""import os
include '{tmp_path}/other.gin'
# A comment = 1
OUTER = %INNER
INNER = 'x'
LOOP = %LOOP
train/a.b.function.lengths = \\
    {{'inputs': 64,
     'targets': 18}}
a.b.evil = @os.system()
a.b.expression = __import__('os').system('exit 1')
INNER = 512
"""
  bindings = parse_bindings(text)
  assert bindings["a.b.evil"] == "@os.system()"
  assert bindings["OUTER"] == "%INNER"
  assert bindings["INNER"] == "512"
  assert bindings["train/a.b.function.lengths"] == "{'inputs': 64, 'targets': 18}"
  assert bindings["a.b.expression"] == "__import__('os').system('exit 1')"
  assert set(bindings) == {
    "OUTER",
    "INNER",
    "LOOP",
    "train/a.b.function.lengths",
    "a.b.evil",
    "a.b.expression",
  }
