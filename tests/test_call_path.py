"""The table in docs/architecture.md of the calls from the command line to the training step."""

from __future__ import annotations

import ast
import functools
import inspect
import pathlib
import sys
import tokenize
import types

import gin
import jax
import pytest

from rosetta_t5 import train

ROOT = pathlib.Path(__file__).resolve().parents[1]
RUN = ROOT / "tests/run"
PAGE = ROOT / "docs/architecture.md"


@functools.cache
def _code_lines(path: str) -> frozenset[int]:
  """The lines of a file that have code: no comments, docstrings or blank lines."""
  quiet = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
  lines: set[int] = set()
  with open(path, encoding="utf-8") as file:
    for token in tokenize.generate_tokens(file.readline):
      if token.type not in quiet:
        lines.update(range(token.start[0], token.end[0] + 1))
  for node in ast.walk(ast.parse(pathlib.Path(path).read_text(encoding="utf-8"))):
    body = getattr(node, "body", None)
    first = body[0] if isinstance(body, list) and body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
      lines -= set(range(first.lineno, (first.end_lineno or 0) + 1))
  return frozenset(lines)


def _is_listed(code: types.CodeType) -> bool:
  """Whether a function is ours or gin's; jax's own layers are left out."""
  path = pathlib.Path(code.co_filename)
  return path.is_relative_to(ROOT / "rosetta_t5") or path.parent.name == "gin"


def _row(code: types.CodeType) -> tuple[str, int]:
  """A function's name and its code lines; 0 for gin's wrapper, which is not ours."""
  path = pathlib.Path(code.co_filename)
  if path.parent.name == "gin":
    return "gin's wrapper, which adds the bindings", 0
  module = ".".join(path.relative_to(ROOT / "rosetta_t5").with_suffix("").parts)
  lines, first = inspect.getsourcelines(code)
  in_code = _code_lines(str(path)).intersection(range(first, first + len(lines)))
  return f"`{module}.{code.co_qualname}`".replace(".<locals>", ""), len(in_code)


def _stack() -> list[types.CodeType]:
  """The functions that are running, the outermost first, without this file's and jax's."""
  frame: types.FrameType | None = sys._getframe(1)
  found: list[types.CodeType] = []
  while frame is not None:
    found.append(frame.f_code)
    frame = frame.f_back
  return found[::-1]


def _from(first: str, stack: list[types.CodeType]) -> list[types.CodeType]:
  return [c for c in stack[[c.co_qualname for c in stack].index(first) :] if _is_listed(c)]


def _table(rows: list[tuple[str, int]]) -> str:
  lines = [f"| {i} | {name} |" for i, (name, _) in enumerate(rows, 1)]
  return "| | function |\n| --- | --- |\n" + "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[types.CodeType]]:
  """The functions that are running when a step begins, and when it is traced, in a run of one step."""
  found: dict[str, list[types.CodeType]] = {}

  class RecordingAnnotation(jax.profiler.StepTraceAnnotation):
    def __init__(self, *args: object, **kwargs: object):
      found.setdefault("begins", _stack()[:-1])
      super().__init__(*args, **kwargs)

  def recording_grad(*args: object, **kwargs: object) -> object:
    found.setdefault("traced", _stack()[:-1])
    return value_and_grad(*args, **kwargs)

  value_and_grad = jax.value_and_grad
  folder = tmp_path_factory.mktemp("call_path")
  files = [f"--gin_file={RUN / 'run.gin'}", f"--gin_search_paths={RUN}"]
  settings = [f"--gin.MODEL_DIR='{folder}'", "--gin.TRAIN_STEPS=1"]
  # Evaluation and checkpoints are not on the path.
  settings += [
    "--gin.train.train_eval_dataset_cfg = None",
    "--gin.utils.CheckpointConfig.save = None",
  ]
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(RUN))
    patch.setattr(jax.profiler, "StepTraceAnnotation", RecordingAnnotation)
    patch.setattr(jax, "value_and_grad", recording_grad)
    try:
      train.main(["train", *files, *settings])
    finally:
      gin.clear_config()
  return found


@pytest.mark.slow
def test_the_documented_path_to_the_step_is_the_one_that_a_run_takes(stacks):
  to_compiled_step = [_row(code) for code in _from("main", stacks["begins"])]
  to_step = [
    *to_compiled_step,
    next(_row(c) for c in stacks["traced"] if c.co_name == "train_step"),
  ]
  table = _table(to_step)
  assert table in PAGE.read_text(), f"update docs/architecture.md:\n{table}"
  assert sum(lines for _, lines in to_step) <= 280


def test_the_documented_path_of_compilation_is_the_one_that_a_run_takes(stacks):
  to_step = _from("train", stacks["traced"])
  names = [code.co_name for code in to_step]
  table = _table([_row(code) for code in to_step[: 1 + names.index("train_step")]])
  assert table in PAGE.read_text(), f"update docs/architecture.md:\n{table}"
