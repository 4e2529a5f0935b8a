"""Settings of the process: jax's persistent compilation cache, and the C library's memory allocator."""

from __future__ import annotations

import ctypes
import hashlib
import os
import pathlib
import platform
import sys
from typing import Any

import jax


def enable_compilation_cache() -> pathlib.Path | None:
  """Lets jax store compiled programs in the user's cache folder, so that the next start is faster.

  JAX_COMPILATION_CACHE_DIR chooses another folder, and JAX_ENABLE_COMPILATION_CACHE=false disables the
  cache; in both cases nothing is changed here.

  Returns:
    The folder; None if nothing was changed.
  """
  settings: Any = jax.config
  if settings.jax_compilation_cache_dir or not settings.jax_enable_compilation_cache:
    return None
  cache_home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  folder = pathlib.Path(cache_home) / "rosetta-t5" / "programs" / _processor_id()
  jax.config.update("jax_compilation_cache_dir", str(folder))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
  return folder


def _processor_id() -> str:
  """Identifies the kind of processor: hosts of several kinds may share a home folder."""
  try:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    facts = sorted({line for line in lines if line.startswith(("model name", "flags"))})
  except OSError:
    facts = [platform.machine(), platform.processor()]
  return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


# Parameters of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_SETTINGS = (
  (_ARENA_MAX, 1),  # other arenas cannot keep large arrays
  (_MMAP_MAX, 0),  # memory outside the heap would always be returned to the kernel
  (_TRIM_THRESHOLD, -1),  # the heap never shrinks
)


def keep_freed_memory() -> bool:
  """Makes the process keep the memory that it frees, for the next array of the same size.

  By default glibc returns every large array to the kernel, which hands the memory out again page by
  page and filled with zeros: on a CPU, each pass over a new array then takes several times as long.
  Call this before the first computation, because it does not affect the arenas of existing threads.
  Only the speed changes; the memory of the process stays at its peak.

  Returns:
    Whether the settings took effect; they exist only in glibc.
  """
  if not sys.platform.startswith("linux"):
    return False
  mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
  if mallopt is None:
    return False
  results = [mallopt(parameter, value) for parameter, value in _SETTINGS]  # sets all of them
  return all(results)
