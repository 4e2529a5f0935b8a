"""Assembles XLA_FLAGS for a run from files of flags, the installed jax, and the user's own flags.

XLA aborts the process on an unknown flag, and flags appear and disappear with every version of jax.

  python -m rosetta_t5.parallel.xla_flags scripts_gpu/xla_flags/many_nodes.txt
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import pathlib
import sys
from collections.abc import Iterable, Sequence


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
  spec = importlib.util.find_spec("jaxlib")
  if spec is None or spec.origin is None:
    raise ValueError("jaxlib is not installed, so its flags are unknown. Run `pip install jax`.")
  unknown, known = set(names), set()
  for library in sorted(pathlib.Path(spec.origin).parent.rglob("*.so*")):
    if not unknown:
      break
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
