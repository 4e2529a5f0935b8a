"""`rosetta-t5 vocab`: trains a SentencePiece vocabulary on files, or shows how one encodes a text."""

from __future__ import annotations

import argparse
import hashlib
import pathlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rosetta_t5.data.local_copies import local_path
from rosetta_t5.data.reading import BadExamples, BlockReader, find_files, make_converter
from rosetta_t5.data.vocabularies.lost_text import count_lost, describe_lost, lost_text_problems
from rosetta_t5.data.vocabularies.sentencepiece_models import (
  count_extra_pieces,
  load_sentencepiece,
  lossless_options,
  train_sentencepiece,
)
from rosetta_t5.files import write_atomically
from rosetta_t5.terminal import machine_path, positive_integer

_MAX_LINE_LENGTH = 4000  # characters
_CHECKED_TEXTS = 500  # number of texts that are encoded and decoded to see what they lose
_OPTIONS = {  # of SentencePiece's trainer
  "byte_fallback": "true or false: whether characters without a piece become bytes (true from --size 1000)",
  "character_coverage": "share of the text's characters that get a piece (0.9995; 1.0 below --size 1000)",
  "required_chars": "characters that get a piece in any case (ASCII from --size 1000)",
  "user_defined_symbols": "pieces that are never split, separated by commas",
  "normalization_rule_name": "nmt_nfkc (the default), nfkc, nmt_nfkc_cf, nfkc_cf or identity",
  "remove_extra_whitespaces": "true or false: whether runs of spaces become one (true)",
  "allow_whitespace_only_pieces": "true or false: whether a run of spaces can be a piece (false)",
  "split_digits": "true or false: whether each digit is a piece of its own (false)",
  "model_type": "unigram (the default) or bpe",
}
_GIN_FILE = """\
In a gin file:

from __gin__ import dynamic_registration
import seqio

seqio.SentencePieceVocabulary:
  sentencepiece_model_file = {file!r}
  extra_ids = 100  # {ids} ids in total
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 vocab`."""
  verbs = parser.add_subparsers(required=True, metavar="{train,show}")
  train = verbs.add_parser("train", help="train a vocabulary with T5's special ids")
  train.add_argument("--input", nargs="+", required=True, metavar="GLOB")
  train.add_argument(
    "--size", type=positive_integer, default=32000, help="pieces, without the sentinels"
  )
  train.add_argument(
    "--out", type=machine_path, required=True, help="the file to write, such as vocabulary.model"
  )
  train.add_argument("--text", "--text-key", default="text", help="column or template")
  train.add_argument(
    "--max-characters", type=positive_integer, default=200_000_000, help="size of the sample"
  )
  for name, text in _OPTIONS.items():
    train.add_argument(f"--{name}", help=f"{text}, as in SentencePiece", metavar="VALUE")
  train.set_defaults(run=_train)
  show = verbs.add_parser("show", help="show the pieces and ids of a text")
  show.add_argument("model")
  show.add_argument("text", nargs="?", default="The quick brown fox, déjà vu: 3.14 ≈ π.")
  show.add_argument(
    "--extra_ids", type=int, default=100, help="sentinels to add, as tasks do (default: 100)"
  )
  show.set_defaults(run=_show)


def _train(arguments: argparse.Namespace) -> int:
  out = pathlib.Path(arguments.out).absolute()
  if out.exists():
    raise ValueError(
      f"--out {arguments.out} exists, and models may have been trained with it: set another file, or "
      "remove it"
    )
  out.parent.mkdir(parents=True, exist_ok=True)  # before the training, which takes minutes
  bad_examples = BadExamples()
  files = find_files(arguments.input)
  checked: list[str] = []
  lines = _sample_lines(files, arguments.text, arguments.max_characters, bad_examples, checked)
  given = {name: getattr(arguments, name) for name in _OPTIONS}
  options = lossless_options(arguments.size) | {n: v for n, v in given.items() if v is not None}
  model = train_sentencepiece(lines, arguments.size, options)
  write_atomically(out, model)
  size = arguments.size
  print(f"{out}: {size} pieces, trained on {len(files)} files; {bad_examples.summary()}")
  print("\n".join(_report_losses(load_sentencepiece(out), checked)))
  print(f"sha256 {hashlib.sha256(model).hexdigest()}")
  print(_GIN_FILE.format(file=str(out), ids=size + 100), end="")
  return 0


def _report_losses(tokenizer: Any, texts: Sequence[str]) -> Iterator[str]:
  """Yields lines about what texts lose, and how much of them is encoded as bytes."""
  counts = sum((count_lost(text, tokenizer) for text in texts), Counter())
  yield from describe_lost(counts)
  ids = [id_ for text in texts for id_ in tokenizer.encode(text)]
  if encoded_as_bytes := sum(map(tokenizer.is_byte, ids)):
    share = encoded_as_bytes / len(ids)
    yield f"{share:.2%} of the tokens are bytes of characters without a piece (--character_coverage)"
  yield from (f"note: {problem}" for problem in lost_text_problems(counts))


def _show(arguments: argparse.Namespace) -> int:
  path = local_path(arguments.model)
  tokenizer = load_sentencepiece(path, arguments.extra_ids)
  ids = tokenizer.encode(arguments.text)
  digest = hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
  sentinels = count_extra_pieces(tokenizer)
  pieces = tokenizer.get_piece_size() - sentinels
  print(f"{path}: {pieces} pieces and {sentinels} sentinels, sha256 {digest}")
  print(f"padding 0, end {tokenizer.eos_id()}, unknown {tokenizer.unk_id()}")
  print(" ".join(tokenizer.encode(arguments.text, out_type=str)))
  print(" ".join(map(str, ids)))
  print(tokenizer.decode(ids))
  return 0


def _sample_lines(
  files: Sequence[str], template: str, max_characters: int, bad: BadExamples, checked: list[str]
) -> Iterator[str]:
  """Yields lines of the files' texts; the same files give the same lines.

  Args:
    files: the files to read.
    template: the column with the text, or a template.
    max_characters: about the number of characters to yield; each file has an equal share.
    bad: receives the records that cannot be used.
    checked: receives the beginnings of random texts, each with the same probability.
  """
  random_texts, seen = random.Random(0), 0
  reader = BlockReader(make_converter({"text": template}), bad_examples=bad)
  for path in random.Random(0).sample(list(files), len(files)):
    remaining = max_characters // len(files)
    for text in (example["text"] for example in reader.examples(path)):
      seen += 1
      place = len(checked) if len(checked) < _CHECKED_TEXTS else random_texts.randrange(seen)
      if place < _CHECKED_TEXTS:
        checked[place : place + 1] = [text[:_MAX_LINE_LENGTH]]
      for line in filter(str.strip, text.splitlines()):
        yield from (line[n : n + _MAX_LINE_LENGTH] for n in range(0, len(line), _MAX_LINE_LENGTH))
        remaining -= len(line)
      if remaining <= 0:
        break
