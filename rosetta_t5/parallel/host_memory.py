"""The C library's memory allocator, set for large arrays that come and go every step."""

from __future__ import annotations

import ctypes
import sys

# mallopt's parameters, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_SETTINGS = (
  (_ARENA_MAX, 1),  # other arenas cannot keep large arrays
  (_MMAP_MAX, 0),  # nothing outside the heap: such memory always goes back
  (_TRIM_THRESHOLD, -1),  # and the heap never shrinks
)


def keep_freed_memory() -> bool:
  """Lets the process keep memory that it frees, for the next array of that size.

  Otherwise glibc returns every large array to the kernel, which hands it out again page by page and
  zeroed: on a CPU each pass over a fresh array then takes several times as long. Call it before
  the first computation, since arenas of threads that exist already stay. It changes nothing but speed,
  and the process's memory stays at its peak.

  Returns:
    Whether there is a glibc to set.
  """
  if not sys.platform.startswith("linux"):
    return False
  mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
  if mallopt is None:
    return False
  done = [bool(mallopt(parameter, value)) for parameter, value in _SETTINGS]
  return all(done)
