"""Settings of the C library's memory allocator for the large arrays of a training step."""

from __future__ import annotations

import ctypes
import sys

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
