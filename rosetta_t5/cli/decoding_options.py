"""The options of `rosetta-t5 infer` and `chat` that control what predictions may contain."""

from __future__ import annotations

import argparse
from typing import Any

from rosetta_t5.terminal.option_types import positive_integer, positive_number

NAMES = ("repetition_penalty", "no_repeat_ngram_size", "min_new_tokens", "bad_word")


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the options; the names are those of the arguments of the decode functions."""
  add = parser.add_argument_group("decoding").add_argument
  add("--repetition_penalty", type=positive_number, help="above 1, tokens are repeated less")
  add(
    "--no_repeat_ngram_size",
    type=positive_integer,
    help="no sequence of this many tokens occurs twice",
  )
  add("--min_new_tokens", type=positive_integer, help="predictions have at least this many tokens")
  add("--bad_word", action="append", help="a text that does not occur; can be given repeatedly")


def apply(options: argparse.Namespace, model: Any) -> None:
  """Makes a model decode as the options specify.

  Raises:
    ValueError: its decode function lacks an argument.
  """
  from rosetta_t5.models.decode_call import set_decode_options

  given = {name: getattr(options, name) for name in NAMES if getattr(options, name) is not None}
  if words := given.pop("bad_word", None):
    given["bad_words_ids"] = [model.output_vocabulary.encode(word) for word in words]
  if given:
    set_decode_options(model, **given)
