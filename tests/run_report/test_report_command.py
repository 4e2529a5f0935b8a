"""`rosetta-t5 report`: the page, the pictures, and errors that say what to change."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import re

import numpy as np
import pytest
import run_files

from rosetta_t5 import cli
from rosetta_t5.run_report.report_command import build_page
from rosetta_t5.run_report.run_folder import read_runs
from rosetta_t5.telemetry.event_files import Series

HOSTILE = "</script><img src=x onerror=\"document.title='stolen'\">'&"


def report(*arguments):
  return cli.main(["report", *map(str, arguments)])


def data_of(page):
  """Returns what a page contains, as its program decodes it."""
  encoded = re.search(r'<script id="data" type="text/plain">([^<]*)</script>', page)
  return json.loads(gzip.decompress(base64.b64decode(encoded[1])))


def values_of(series):
  return np.frombuffer(base64.b64decode(series["points"]["values"]), "<f4")


def test_the_page_is_one_file_that_needs_no_network(runs, tmp_path, capsys):
  out = tmp_path / "new" / "report.html"
  assert report(*runs, "--out", out) == 0
  assert f"{out}  2.0 MB, first, second" in capsys.readouterr().out
  page = out.read_text()
  assert len(page.encode()) < 6e6
  assert not re.search(r"""(src|href)=["']?(http|//)""", page.partition('id="data"')[0])
  assert [
    panel["title"] for panel in data_of(page)["panels"] if panel["section"] == "Training"
  ] == [
    "Loss",
    "Parts of the loss",
    "Accuracy",
    "Learning rate",
    "Gradient norm",
    "Throughput",
    "Model FLOPs utilization",
    "Wait for data",
    "Peak memory",
  ]


@pytest.mark.slow
def test_long_runs_of_many_metrics_stay_small_and_keep_their_extremes(runs):
  steps = np.arange(200_000)
  noise = np.random.default_rng(0).normal(size=steps.size)
  noise[123_456] = 1e6
  series = {f"metric_{n}": Series(steps, 10.0 * steps, noise) for n in range(100)}
  run = dataclasses.replace(read_runs([str(runs[0])])[0], series={"train": series})
  page = build_page([run])
  assert len(page) < 6e6
  assert values_of(data_of(page)["runs"][0]["series"]["train"]["metric_7"]).max() == 1e6


def test_nothing_in_a_run_becomes_markup(tmp_path):
  folder = run_files.write_run(tmp_path / HOSTILE.replace("/", "∕"))
  run_files.add_event_file(folder / "train", [(1, {HOSTILE: 1.0})], started=run_files.STARTED + 9)
  run_files.add_predictions(folder, 300, HOSTILE)
  (folder / "config.gin").write_text(f"NAME = {HOSTILE!r}\n")
  out = tmp_path / "report.html"
  assert report(folder, "--out", out) == 0
  page = out.read_text()
  assert "<img" not in page
  assert page.count("<script") == page.count("</script>") == 3
  assert data_of(page)["runs"][0]["config"]["NAME"] == repr(HOSTILE)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["{runs}/nowhere"], "nowhere contains no metrics of a run: give a MODEL_DIR"),
    (["{run}", "--out", "{tmp}"], "error: {tmp}: Is a directory"),
    (["{run}", "--out", "{run}/config.gin/a.html"], "config.gin: (Not a directory|File exists)"),
    (["{run}", "--follow", "--out", "{tmp}/a.html"], "--follow serves the page and writes no file"),
    (["{run}", "--follow", "--port", "99999"], "--port 99999 cannot be used"),
  ],
)
def test_errors_name_the_argument(arguments, message, runs, tmp_path, capsys):
  names = {"runs": runs[0].parent, "run": runs[0], "tmp": tmp_path}
  with pytest.raises(SystemExit) as ended:
    report(*(argument.format(**names) for argument in arguments))
  assert ended.value.code in (1, 2)
  assert re.search(message.replace("{tmp}", str(tmp_path)), capsys.readouterr().err)
