"""The options by which a user trusts a file that somebody else may have written."""

from __future__ import annotations

import argparse

from rosetta_t5.config.language.allow_list import AllowList


def add_trust_options(parser: argparse.ArgumentParser) -> None:
  """Adds --module and --trust."""
  add = parser.add_argument_group("files from elsewhere (docs/security.md)").add_argument
  add("--module", action="append", help="a module of yours that the gin files may use; repeatable")
  add("--trust", action="store_true", help="run whatever code the gin files name")


def allowed_by(options: argparse.Namespace) -> AllowList | None:
  """Returns what the files of a command may use; None for everything."""
  return None if options.trust else AllowList(tuple(options.module or ()))
