"""Text that every machine has: docstrings and comments of the running Python's standard library.

It is about 2 MB of English about code, for runs that need real text without a download.
"""

from __future__ import annotations

import ast
import pathlib
import re
import sysconfig
from collections.abc import Iterator

_EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_MIN_CHARACTERS = 40
# A paragraph with a smaller share of letters and spaces is a table, a listing or a drawing.
_MIN_LETTERS = 0.8


def stdlib_paragraphs(root: pathlib.Path | None = None) -> Iterator[str]:
  """Yields the distinct paragraphs of a folder's Python files, in the sorted order of the files.

  Args:
    root: the folder; by default the running Python's standard library. Its tests and installed
      packages are excluded.
  """
  root = pathlib.Path(sysconfig.get_path("stdlib")) if root is None else root
  seen: set[str] = set()
  for path in sorted(root.rglob("*.py")):
    if _EXCLUDED_FOLDERS & set(path.relative_to(root).parts):
      continue
    for text in _texts(path):
      for paragraph in _paragraphs(text):
        if paragraph not in seen:
          seen.add(paragraph)
          yield paragraph


def _texts(path: pathlib.Path) -> Iterator[str]:
  """Yields a file's docstrings, then its blocks of comments. Files that do not parse yield nothing."""
  try:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
  except (SyntaxError, ValueError, OSError):
    return  # The library contains broken files on purpose, for example as test data of lib2to3.
  documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
  for node in ast.walk(tree):
    if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
      yield docstring
  yield from _comment_blocks(source, tree)


def _comment_blocks(source: str, tree: ast.Module) -> Iterator[str]:
  """Yields runs of comment lines.

  The syntax tree shows which lines are inside strings; on all other lines, `#` starts a comment. For
  whole lines this gives the same result as the tokenizer, ten times faster.
  """
  in_strings: set[int] = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Constant | ast.JoinedStr):
      in_strings.update(range(node.lineno + 1, (node.end_lineno or node.lineno) + 1))
  block: list[str] = []
  for number, line in enumerate([*source.split("\n"), ""], start=1):
    stripped = line.strip()
    if stripped.startswith("#") and number not in in_strings:
      block.append(stripped.lstrip("#!: "))
    elif block:
      yield "\n".join(block)
      block = []


def _paragraphs(text: str) -> Iterator[str]:
  """Yields a text's paragraphs of prose, each on one line."""
  for raw in re.split(r"\n\s*\n", text):
    paragraph = " ".join(raw.split())
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    if (
      len(paragraph) >= _MIN_CHARACTERS
      and letters >= _MIN_LETTERS * len(paragraph)
      and ">>>" not in paragraph
    ):
      yield paragraph
