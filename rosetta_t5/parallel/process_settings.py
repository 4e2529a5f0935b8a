"""Settings of the process: XLA's flags, jax's compilation cache, and the C library's memory allocator.

XLA aborts the process on an unknown flag, and flags appear and disappear with every version of jax. Run as a
program, this module prints XLA_FLAGS for a run, from files of flags, the installed jax, and the user's own flags:

  python -m rosetta_t5.parallel.process_settings scripts_gpu/xla_flags/many_nodes.txt
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import pathlib
import platform
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jaxlib


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
  # Hosts with several kinds of processors may share a home folder.
  cpuinfo = pathlib.Path("/proc/cpuinfo")
  lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else [platform.machine()]
  kinds = {line for line in lines if line.startswith(("model name", "flags"))} or {lines[0]}
  digest = hashlib.sha256("\n".join(sorted(kinds)).encode()).hexdigest()[:16]
  folder = pathlib.Path(cache_home) / "rosetta-t5" / "programs" / digest
  jax.config.update("jax_compilation_cache_dir", str(folder))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
  return folder


# Parameters of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_MALLOC_SETTINGS = (
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
  if platform.libc_ver()[0] != "glibc":
    return False
  mallopt = ctypes.CDLL(None).mallopt
  return min(mallopt(parameter, value) for parameter, value in _MALLOC_SETTINGS) == 1


def assemble_flags(wanted: Iterable[str], user_flags: str) -> tuple[str, list[str]]:
  """Returns XLA_FLAGS, and the wanted flags that the installed jax does not know.

  Args:
    wanted: flags of the form --NAME=VALUE.
    user_flags: the present value of XLA_FLAGS. Its flags are kept unchanged; a wanted flag of the same
      name is omitted.
  """
  user_names = {_name(flag) for flag in user_flags.split()}
  wanted = [flag for flag in wanted if _name(flag) not in user_names]
  known = find_known_flags({_name(flag) for flag in wanted})
  kept = [flag for flag in wanted if _name(flag) in known]
  return " ".join([*kept, *user_flags.split()]), [f for f in wanted if _name(f) not in known]


def find_known_flags(names: Iterable[str]) -> set[str]:
  """Returns the flag names that appear in jaxlib's libraries.

  XLA prints its flags only when it aborts, but its libraries contain each name as a C string.
  """
  unknown, known = set(names), set()
  for library in sorted(pathlib.Path(jaxlib.__file__).parent.rglob("*.so*")):
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
      found = {name for name in unknown if text.find(name.encode() + b"\0") >= 0}
    known |= found
    unknown -= found
  return known


def read_flags(path: str | os.PathLike[str]) -> list[str]:
  """Returns the flags in a file: one per line; `#` starts a comment."""
  lines = (line.split("#")[0].strip() for line in pathlib.Path(path).read_text().splitlines())
  return [line for line in lines if line]


def _name(flag: str) -> str:
  return flag.removeprefix("--").partition("=")[0]


def main(argv: Sequence[str] | None = None) -> None:
  """Prints XLA_FLAGS assembled from the flags in the files and the present XLA_FLAGS."""
  files = sys.argv[1:] if argv is None else argv
  wanted = [flag for file in files for flag in read_flags(file)]
  flags, unknown = assemble_flags(wanted, os.environ.get("XLA_FLAGS", ""))
  for flag in unknown:
    print(f"xla_flags: omitted, because this jax does not know it: {flag}", file=sys.stderr)
  print(flags)


if __name__ == "__main__":
  main()
