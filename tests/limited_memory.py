"""Memory that ends early, for tests of what is told then."""

from __future__ import annotations

import pathlib
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limited_memory(more: int) -> Iterator[None]:
  """Inside a `with`, this process gets so many more bytes than it has, and no more."""
  pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
  soft, hard = resource.getrlimit(resource.RLIMIT_AS)
  resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
