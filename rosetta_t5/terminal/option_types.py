"""Types of the arguments of commands, with errors that state what was expected."""

from __future__ import annotations

import argparse


def positive_integer(text: str) -> int:
  """Returns a positive integer.

  Raises:
    ArgumentTypeError: the text is something else.
  """
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
  return int(text)


def feature_lengths(text: str) -> dict[str, int]:
  """Returns the lengths of features, such as {"inputs": 512, "targets": 128}.

  Raises:
    ArgumentTypeError: the text is not like inputs=512,targets=128.
  """
  lengths = {}
  for part in text.split(","):
    name, _, length = part.partition("=")
    if not name or not length.isdecimal() or int(length) < 1:
      raise argparse.ArgumentTypeError(f"must be like inputs=512,targets=128, got {text!r}")
    lengths[name] = int(length)
  return lengths
