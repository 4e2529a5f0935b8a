"""Keeps compiled programs between runs."""

from __future__ import annotations

import hashlib
import os
import pathlib
import platform
from typing import Any

import jax


def enable_compilation_cache() -> pathlib.Path | None:
  """Lets jax keep what it compiles under the user's cache folder, for the next start of a run.

  A folder that the user has chosen (JAX_COMPILATION_CACHE_DIR) is left as it is, and
  JAX_ENABLE_COMPILATION_CACHE=false turns it off.

  Returns:
    The folder; None where nothing was changed.
  """
  settings: Any = jax.config
  if settings.jax_compilation_cache_dir or not settings.jax_enable_compilation_cache:
    return None
  cache_home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  folder = pathlib.Path(cache_home) / "rosetta-t5" / "programs" / _processor()
  jax.config.update("jax_compilation_cache_dir", str(folder))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
  return folder


def _processor() -> str:
  """Names this kind of processor: hosts that share a home folder may be of several kinds."""
  try:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    facts = sorted({line for line in lines if line.startswith(("model name", "flags"))})
  except OSError:
    facts = [platform.machine(), platform.processor()]
  return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
