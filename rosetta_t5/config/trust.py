"""The option by which a user trusts a file that somebody else may have written."""

from __future__ import annotations

import argparse


def add_trust_option(parser: argparse.ArgumentParser) -> None:
  """Adds --trust. A command that has it is limited to listed code without it (`cli.command`)."""
  group = parser.add_argument_group("files from elsewhere (docs/security.md)")
  group.add_argument("--trust", action="store_true", help="run whatever code the gin files name")
