"""Types of the arguments of commands, with errors that state what was expected."""

from __future__ import annotations

import argparse
import contextlib


def positive_integer(text: str) -> int:
  """Returns a positive integer.

  Raises:
    ArgumentTypeError: the text is something else.
  """
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
  return int(text)


def positive_number(text: str) -> float:
  """Returns a number greater than 0.

  Raises:
    ArgumentTypeError: the text is something else.
  """
  with contextlib.suppress(ValueError):
    if 0 < (number := float(text)) < float("inf"):
      return number
  raise argparse.ArgumentTypeError(f"must be a number greater than 0, got {text!r}")


def machine_path(text: str) -> str:
  """Returns a path on this machine.

  Raises:
    ArgumentTypeError: the path is in remote storage.
  """
  if "://" in text:
    raise argparse.ArgumentTypeError(f"must be a path on this machine, got {text!r}")
  return text


def percentage(text: str) -> float:
  """Returns a number from 0 to 100.

  Raises:
    ArgumentTypeError: the text is something else.
  """
  with contextlib.suppress(ValueError):
    if 0 <= (number := float(text)) <= 100:
      return number
  raise argparse.ArgumentTypeError(f"must be a number from 0 to 100, got {text!r}")


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
