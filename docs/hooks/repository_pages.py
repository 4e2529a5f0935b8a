"""Makes pages outside docs/ part of the site, and lets long identifiers break after their punctuation."""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PAGES = (
  "README.md",
  "CHANGELOG.md",
  "CONTRIBUTING.md",
  "LICENSE",
  "SECURITY.md",
  "benchmarks/results/*.md",
)
_PATH_IN_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)[^)#\s]+")
# Inline code, and in it the places after punctuation between letters.
_CODE = re.compile(r"(?<!>)<code>.*?</code>", re.DOTALL)
_PUNCTUATION = re.compile(
  r"(?<=[\w\])'\"}])([./_=,])(?=[\w{'\"%@\[(])(?![^<]*>)"
)
_ROOT = pathlib.Path(__file__).resolve().parents[2]


def on_files(files: Files, config: Any) -> Files:
  """Adds PAGES under their paths in the repository."""
  for path in sorted(path for pattern in PAGES for path in _ROOT.glob(pattern)):
    name = path.relative_to(_ROOT).as_posix()
    files.append(File.generated(config, name, abs_src_path=str(path)))
  return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
  """Rewrites links to files of the repository as links to pages of the site, without docs/."""
  folder = os.path.dirname(os.path.relpath(str(page.file.abs_src_path), _ROOT))
  site_folder = os.path.dirname(page.file.src_uri)

  def in_site(link: re.Match[str]) -> str:
    path = os.path.normpath(os.path.join(folder, link[0])).removeprefix("docs/")
    return os.path.relpath(path, site_folder or ".")

  return _PATH_IN_LINK.sub(in_site, markdown)


def on_page_content(html: str, **_: Any) -> str:
  """Lets inline code break where a reader would break it."""
  return _CODE.sub(lambda code: _PUNCTUATION.sub(r"\1<wbr>", code[0]), html)
