"""Assembles XLA_FLAGS for a run: what a file asks for and the installed jax knows, then the user's.

XLA ends the process on a flag that it does not know, and flags come and go with every jax.

  python -m rosetta_t5.parallel.xla_flags scripts_gpu/xla_flags/many_nodes.txt
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import pathlib
import sys
from collections.abc import Iterable, Sequence


def assemble(wanted: Iterable[str], users: str) -> tuple[str, list[str]]:
  """Returns XLA_FLAGS, and the wanted flags that the installed jax does not know.

  Args:
    wanted: flags of the form --NAME=VALUE.
    users: what XLA_FLAGS is already. Its flags stay as they are; a wanted flag of the same name is left
      out, for XLA takes the last one.
  """
  users_names = {_name(flag) for flag in users.split()}
  wanted = [flag for flag in wanted if _name(flag) not in users_names]
  known = known_flags({_name(flag) for flag in wanted})
  taken = [flag for flag in wanted if _name(flag) in known]
  return " ".join([*taken, *users.split()]), [f for f in wanted if _name(f) not in known]


def known_flags(names: Iterable[str]) -> set[str]:
  """Returns those of the flags' names that stand in jaxlib's libraries.

  XLA can print its flags only by way of aborting; its libraries hold each name as a C string.
  """
  spec = importlib.util.find_spec("jaxlib")
  if spec is None or spec.origin is None:
    raise ValueError("jaxlib is not installed: its flags cannot be known. Run `pip install jax`.")
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
  """Returns a file's flags: one a line, `#` begins a comment."""
  lines = (line.split("#")[0].strip() for line in pathlib.Path(path).read_text().splitlines())
  return [line for line in lines if line]


def _name(flag: str) -> str:
  return flag.removeprefix("--").partition("=")[0]


def main(argv: Sequence[str] | None = None) -> None:
  """Prints XLA_FLAGS made of the files' flags and of XLA_FLAGS."""
  files = sys.argv[1:] if argv is None else argv
  wanted = [flag for file in files for flag in read_flags(file)]
  flags, unknown = assemble(wanted, os.environ.get("XLA_FLAGS", ""))
  for flag in unknown:
    print(f"xla_flags: left out, this jax does not know it: {flag}", file=sys.stderr)
  print(flags)


if __name__ == "__main__":
  main()
