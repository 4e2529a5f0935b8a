"""Every command, gin file and program in the README and in docs/ works as it stands."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import pathlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import shell
from inline_executor import InlineExecutor
from snippets import PAGES, Snippet, read_snippets
from user_files import TEXTS, copy_user_files, run_quickstart, write_user_files

from rosetta_t5.config.language.gin_internals import unregister
from rosetta_t5.data import quickstart_data
from rosetta_t5.data.local_copies import T5_VOCABULARY
from rosetta_t5.data.tensorflow_import import import_seqio

LANGUAGES = {"bash", "console", "gin", "python", "json", "text"}
WITH_SNIPPETS = [
  page for page in PAGES if any(s.language != "text" and not s.reason for s in read_snippets(page))
]
# Pages whose dry run takes more than two seconds of processor time.
LONG_PAGES = {
  *(f"docs/{name}.md" for name in ("checking", "checkpoints", "conversion", "data", "gin")),
  *(f"docs/{name}.md" for name in ("finetuning", "inference", "optimizers", "scaling", "training")),
  "docs/how-to/pretrain.md",
  *(f"docs/fields/{name}.md" for name in ("time-series", "translation")),
}
# What a gin block is added to, if its page does not say.
RUN = """
include 't5x/examples/t5/t5_1_1/small.gin'
include 't5x/configs/runs/pretrain.gin'

from __gin__ import dynamic_registration
from rosetta_t5 import data

MIXTURE_OR_TASK_NAME = @data.file_task()
data.file_task:
  files = 'train-0.txt'
  vocabulary = %VOCABULARY
TASK_FEATURE_LENGTHS = {'inputs': 64, 'targets': 32}
USE_CACHED_TASKS = False
TRAIN_STEPS = 10
DROPOUT_RATE = 0.0
MODEL_DIR = 'runs/new'
"""
# What computes for long even if it is tiny, or needs the results of a run.
LONG = (
  "rosetta-t5 finetune",
  "rosetta-t5 eval --model_dir",
  "rosetta-t5 infer --model_dir",
  "rosetta-t5 embed --model_dir",
  "rosetta-t5 export --model_dir",
  "rosetta-t5 chat",
  "rosetta-t5 inspect",
  "rosetta-t5 report",
  "rosetta-t5 convert runs/domain",
  "rosetta-t5 serve",
  "http://127.0.0.1:8000",
  "python sweep.py",
  "quickstart_finetune.gin",
  "load_stablehlo",
  "taught.jsonl",
  "samples.jsonl",
  "corrected.jsonl",
  "answers.npy",
  "rosetta-t5 convert runs/series",
)


@pytest.fixture(scope="module")
def user_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
  """The files that the pages assume; the variables with which they are found are set."""
  folder = tmp_path_factory.mktemp("user")
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("ROSETTA_T5_DATA", str(folder / "data"))
    patch.setenv("ROSETTA_T5_ASSETS", f"{T5_VOCABULARY}={folder / 'spiece.model'}")
    patch.setenv(quickstart_data.FOLDER_VARIABLE, str(folder / "quickstart/data"))
    patch.setattr(quickstart_data, "VOCAB_SIZE", 300)
    patch.setattr("rosetta_t5.parallel.process_settings.enable_compilation_cache", lambda: None)
    # Processes that tokenize would take seconds to start.
    prepare = importlib.import_module("rosetta_t5.data.prepared.prepare")
    patch.setattr(prepare, "ProcessPoolExecutor", lambda *_, **options: InlineExecutor())
    quickstart_data.prepare(paragraphs=TEXTS)
    _register_stdlib_docs()
    write_user_files(folder)
    yield folder
  _register_stdlib_docs()


@pytest.fixture(scope="module")
def quickstart_run(user_files: pathlib.Path) -> None:
  run_quickstart(user_files)


def _register_stdlib_docs() -> None:
  """Registers the quickstart's task for the folder of text that is current."""
  from rosetta_t5.data.tasks import stdlib_docs

  import_seqio().TaskRegistry.remove(stdlib_docs.TASK)
  stdlib_docs.register()


@pytest.fixture
def run_page(
  user_files: pathlib.Path, tmp_path: pathlib.Path, isolated_registries: None
) -> Iterator[Callable[..., None]]:
  """Runs all blocks of a page, in order, in a folder with the user's files."""
  copy_user_files(user_files, tmp_path)
  before = set(sys.modules)

  def run(page: str, dry: bool) -> None:
    with contextlib.closing(_PageRunner(tmp_path, dry)) as runner:
      for snippet in read_snippets(page):
        if not snippet.reason:
          runner.run(snippet)

  yield run
  for name in set(sys.modules) - before:  # the modules that the page has written
    if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
      for function in filter(callable, vars(sys.modules.pop(name)).values()):
        unregister(function)


class _PageRunner:
  """Runs the blocks of one page; later ones can use what earlier ones have left."""

  def __init__(self, folder: pathlib.Path, dry: bool):
    self._folder, self._dry = folder, dry
    self._gin_file = ""  # the last one that the page shows
    self._names: dict[str, Any] = {"__name__": "snippet"}
    self._server: shell.Server | None = None

  def close(self) -> None:
    if self._server:
      self._server.close()

  def run(self, snippet: Snippet) -> None:
    if snippet.title:
      (self._folder / snippet.title).write_text(snippet.text)
    if self._dry and any(long in snippet.text for long in LONG):
      return
    if "import optuna" in snippet.text and not self._dry:
      pytest.importorskip("optuna", reason="Optuna is not installed")
    if self._server:
      text = snippet.text.replace("http://127.0.0.1:8000", self._server.url)
      snippet = dataclasses.replace(snippet, text=text)
    if snippet.text.startswith("rosetta-t5 serve"):
      self._server = shell.Server(snippet.text, self._folder)
    elif snippet.language in ("bash", "console"):
      shell.run_script(snippet.text, self._folder, self._dry)
    elif snippet.language == "gin" and snippet.title:
      self._gin_file = snippet.title
    elif snippet.language == "gin":  # A block that imports nothing continues the file before it.
      is_whole = "import" in snippet.text or not self._gin_file
      check_gin(("" if is_whole else f"include '{self._gin_file}'\n") + snippet.text, self._folder)
    elif snippet.language == "python" and not snippet.title:
      program = compile(snippet.text, snippet.place, "exec")
      status, output, errors = shell.call(
        lambda: exec(program, self._names), str(self._folder), dict(os.environ)
      )
      assert status == 0, output + errors


def check_gin(text: str, folder: pathlib.Path) -> None:
  """Checks that a run with this gin file could start."""
  (folder / "run.gin").write_text(RUN)
  (folder / "block.gin").write_text(f"include 'run.gin'\n{text}")
  status, output, errors = shell.call(
    lambda: shell.run_in_process(["rosetta-t5", "check", "block.gin", "--trust"], dry=True),
    str(folder),
    dict(os.environ),
  )
  assert status == 0, f"{text}\n{output}{errors}"


@pytest.mark.parametrize(
  "page",
  [pytest.param(page, marks=[pytest.mark.slow] * (page in LONG_PAGES)) for page in WITH_SNIPPETS],
)
def test_the_snippets_of_a_page_pass_a_dry_run(page: str, run_page: Callable[..., None]) -> None:
  run_page(page, dry=True)


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_SNIPPETS)
@pytest.mark.usefixtures("quickstart_run")
def test_the_snippets_of_a_page_run(page: str, run_page: Callable[..., None]) -> None:
  run_page(page, dry=False)


@pytest.mark.parametrize(
  "command",
  [
    "rosetta-t5 prepare --input corpus --vocab spiece.model --out tokens",
    "rosetta-t5 vocab train --input corpus --size 200 --out my.model",
  ],
)
def test_the_gin_file_that_a_command_prints_works(
  command: str, user_files: pathlib.Path, tmp_path: pathlib.Path, isolated_registries: None
) -> None:
  copy_user_files(user_files, tmp_path)
  printed = shell.run_script(command, tmp_path, dry=False)
  check_gin(printed.partition("In a gin file:\n")[2], tmp_path)


def test_the_flags_that_a_check_prints_for_missing_values_work(
  user_files: pathlib.Path, tmp_path: pathlib.Path
) -> None:
  check = (
    "rosetta-t5 check t5x/examples/t5/t5_1_1/small.gin t5x/configs/runs/pretrain.gin "
    "--gin.USE_CACHED_TASKS=False --gin.MIXTURE_OR_TASK_NAME=\"'the_pile_span_corruption'\""
  )
  printed = shell.run_script(f"{check} || true", tmp_path, dry=True)
  flags = re.findall(r"^ +(--gin\..*)", printed, re.MULTILINE)
  assert len(flags) == 4, printed
  shell.run_script(" ".join([check, *flags]), tmp_path, dry=True)


@pytest.mark.slow
def test_the_flags_that_plan_prints_work(user_files: pathlib.Path, tmp_path: pathlib.Path) -> None:
  recipe = "gin/examples/small_pile_pretrain.gin"
  printed = shell.run_script(f"rosetta-t5 plan {recipe} --devices 8 --gpu h100", tmp_path, dry=True)
  flags = re.search(r"^1\..*?\n(( +--gin.*\n)+)", printed, re.MULTILINE)
  assert flags, printed
  check = f"rosetta-t5 check {recipe} --devices=8 --gin.MODEL_DIR=\"'runs/new'\""
  shell.run_script(f"{check} \\\n{flags[1]}", tmp_path, dry=True)


def _all_snippets() -> list[Snippet]:
  return [snippet for page in PAGES for snippet in read_snippets(page)]


def test_every_block_has_a_language() -> None:
  assert [s.place for s in _all_snippets() if s.language not in LANGUAGES] == []


def test_no_line_of_a_block_is_longer_than_80_columns() -> None:
  long = [s.place for s in _all_snippets() if max(map(len, s.text.splitlines()), default=0) > 80]
  assert long == []


def test_the_texts_of_links_are_no_file_names() -> None:
  pages = {page: re.findall(r"\[([\w/-]+\.md)\]\(", PAGES[page].read_text()) for page in PAGES}
  assert {page: names for page, names in pages.items() if names} == {}


def test_few_blocks_cannot_run_here() -> None:
  reasons = Counter(snippet.reason for snippet in _all_snippets() if snippet.reason)
  assert reasons == {
    "installs packages": 4,
    "needs GPUs": 4,
    "needs the gin files of another project": 1,
    "needs Slurm": 2,
    "needs XLA's GPU compiler": 1,
  }
