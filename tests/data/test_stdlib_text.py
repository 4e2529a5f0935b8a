"""Paragraphs of Python files: docstrings and comments that are prose, without duplicates."""

from __future__ import annotations

import itertools
import pathlib

from rosetta_t5.data.local_files.stdlib_text import stdlib_paragraphs

SOURCE = '''
"""The module's docstring, long enough to be one paragraph of prose.

    >>> this_is_a_doctest("and no prose, however long it may be")

A second paragraph, over
two lines of the file and long enough.
"""

# A comment above the function which is
# continued on the line below it, in prose.
def function():
  """Too short."""
  text = """
  # This looks like a comment but stands in a string literal.
  """
  return text  # A comment behind code is no line of prose of its own.

# ======================= +++ ----- {} [] () ;;;; ====================
x = {0: 1, 2: 3}
# The module's docstring, long enough to be one paragraph of prose.
'''


def test_docstrings_and_comments_that_are_prose_are_extracted_once(tmp_path: pathlib.Path) -> None:
  (tmp_path / "module.py").write_text(SOURCE)
  (tmp_path / "broken.py").write_text("# A comment in a file that does not parse as Python\n(")
  (tmp_path / "latin.py").write_bytes(b"# \xe9 is no valid UTF-8 and so the file is left out.\n")
  (tmp_path / "test").mkdir()
  (tmp_path / "test" / "case.py").write_text("# Tests of the library are left out, all of them.\n")
  assert list(stdlib_paragraphs(tmp_path)) == [
    "The module's docstring, long enough to be one paragraph of prose.",
    "A second paragraph, over two lines of the file and long enough.",
    "A comment above the function which is continued on the line below it, in prose.",
  ]


def test_the_running_pythons_library_has_such_text() -> None:
  first = list(itertools.islice(stdlib_paragraphs(), 50))
  assert len(set(first)) == 50
  assert first == list(itertools.islice(stdlib_paragraphs(), 50))
