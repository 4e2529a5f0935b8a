"""The options of `rosetta-t5 infer` and `chat` that control what predictions may contain."""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
from typing import Any

from rosetta_t5.terminal import positive_integer, positive_number

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
  from rosetta_t5.models.base_model import set_decode_fn

  given = {name: getattr(options, name) for name in NAMES if getattr(options, name) is not None}
  if words := given.pop("bad_word", None):
    given["bad_words_ids"] = [model.output_vocabulary.encode(word) for word in words]
  if any((getattr(options, name, None) or 1) > 1 for name in ("n_best", "num_decodes")):
    _search_instead_of_greedy(model)
  if given:
    set_decode_fn(model, model.decode_fn, **given)


def _search_instead_of_greedy(model: Any) -> None:
  """Replaces greedy decoding, whose decodes would all be equal, by beam search with the same controls."""
  from rosetta_t5 import decoding
  from rosetta_t5.config.saved_config import bindings_of
  from rosetta_t5.models.base_model import set_decode_fn

  decode_fn: Any = model.decode_fn
  bound: dict[str, Any] = {}
  while isinstance(decode_fn, functools.partial):
    decode_fn, bound = decode_fn.func, {**decode_fn.keywords, **bound}
  bound = {**bindings_of(decode_fn), **bound}
  is_sampling = inspect.unwrap(decode_fn) is inspect.unwrap(decoding.temperature_sample)
  if is_sampling and (bound.get("topk", 1) == 1 or bound.get("temperature") == 0):
    kept = {name: bound[name] for name in decoding.Controls._fields if name in bound}
    if bound.get("max_decode_steps"):
      kept["max_decode_step"] = bound["max_decode_steps"]
    set_decode_fn(model, decoding.beam_search, **kept)
    print(
      "note: the model decodes greedily; several decodes are made by beam search", file=sys.stderr
    )
