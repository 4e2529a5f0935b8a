"""The bindings in the text of a gin file. Nothing is imported, evaluated or included.

A report may be made of a folder that somebody else sent, so its config.gin is only text here.
"""

from __future__ import annotations

import ast
import re
from typing import Any

_BINDING = re.compile(r"(?P<name>[\w./]+)\s*=\s*(?P<value>.*)", re.DOTALL)
_CONTINUES = (" ", "\t", ")", "]", "}")


def parse_bindings(text: str) -> dict[str, str]:
  """Returns {name: value} as text; the last binding of a name counts."""
  statements: list[str] = []
  for line in text.splitlines():
    if not line.strip() or line.lstrip().startswith("#"):
      continue
    if line.startswith(_CONTINUES) and statements:
      statements[-1] = f"{statements[-1].removesuffix(chr(92)).rstrip()} {line.strip()}"
    else:
      statements.append(line.rstrip())
  found = (_BINDING.fullmatch(statement) for statement in statements)
  return {match["name"]: match["value"].strip() for match in found if match}


def gin_of_markdown(text: str) -> str:
  """Returns the gin file that TensorBoard shows as an indented block."""
  lines = [line.removeprefix("    ") for line in text.splitlines() if line.startswith("    ")]
  return "\n".join(lines)


def value_of(bindings: dict[str, str], *names: str) -> Any:
  """Returns the value of the first binding that ends with one of `names`; None if there is none.

  Macros are followed. The value is a number, a string, a list and so on, or the text of a reference.
  """
  for name in names:
    for bound, text in bindings.items():
      if bound == name or bound.endswith((f".{name}", f"/{name}")):
        return _plain_value(bindings, text)
  return None


def _plain_value(bindings: dict[str, str], text: str) -> Any:
  for _ in bindings:  # A chain of macros is never longer than this.
    if not text.startswith("%"):
      break
    macro = text[1:]
    text = bindings.get(macro, bindings.get(f"{macro}/macro.value", ""))
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    return text or None
