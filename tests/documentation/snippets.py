"""Reads the fenced blocks of Markdown pages."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import textwrap
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = {
  path.relative_to(ROOT).as_posix(): path
  for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
_BLOCK = re.compile(
  r"""^(?:<!--\ not\ run:\ (?P<reason>.+?)\ -->\n)?
  (?P<indent>\ *)```(?P<language>\w*)(?:\ title="(?P<title>[^"]+)")?\n
  (?P<text>.*?)^(?P=indent)```$""",
  re.MULTILINE | re.DOTALL | re.VERBOSE,
)
_PROMPT = re.compile(r"^\$ ((?:.*\\\n)*.*)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Snippet:
  """A fenced block.

  Attributes:
    place: the page and the line.
    language: `bash`, `console` (commands after `$`, with their output), `gin`, `python`, `json`, or
      `text` for what is neither run nor read.
    text: the block's contents; of `console`, only the commands.
    title: the file that the block shows, or "".
    reason: why the block cannot run here, or "".
  """

  place: str
  language: str
  text: str
  title: str
  reason: str


def read_snippets(page: str) -> Iterator[Snippet]:
  """Yields the blocks of a page in order."""
  markdown = PAGES[page].read_text()
  for block in _BLOCK.finditer(markdown):
    text = textwrap.dedent(block["text"])
    if block["language"] == "console":
      text = "\n".join(_PROMPT.findall(text)) + "\n"
    line = markdown.count("\n", 0, block.start()) + 1
    title, reason = block["title"] or "", block["reason"] or ""
    yield Snippet(f"{page}:{line}", block["language"], text, title, reason)
