"""A limit on memory, for tests of the errors that are raised when it runs out."""

from __future__ import annotations

import pathlib
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limited_memory(more: int) -> Iterator[None]:
  """Inside a `with`, this process can allocate at most `more` further bytes."""
  pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
  soft, hard = resource.getrlimit(resource.RLIMIT_AS)
  resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
