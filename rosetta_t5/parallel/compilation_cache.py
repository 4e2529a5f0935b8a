"""Enables jax's persistent compilation cache."""

from __future__ import annotations

import hashlib
import os
import pathlib
import platform
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
