"""`rosetta-t5 vocab`: trains a SentencePiece vocabulary on files, or shows how one encodes a text."""

from __future__ import annotations

import argparse
import hashlib
import os
import pathlib
import random
from collections.abc import Iterator, Sequence

from rosetta_t5.data.local_files.local_assets import load_sentencepiece, local_path
from rosetta_t5.data.reading import BadExamples, BlockReader, find_files
from rosetta_t5.data.reading.templates import make_converter
from rosetta_t5.data.vocabularies.sentencepiece_training import train_sentencepiece
from rosetta_t5.telemetry.atomic_files import write_atomically
from rosetta_t5.terminal import ctrl_c
from rosetta_t5.terminal.option_types import machine_path, positive_integer

_MAX_LINE_LENGTH = 4000  # characters; SentencePiece skips lines of more than 4192 bytes
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
  train.set_defaults(run=_train)
  show = verbs.add_parser("show", help="show the pieces and ids of a text")
  show.add_argument("model")
  show.add_argument("text", nargs="?", default="The quick brown fox, déjà vu: 3.14 ≈ π.")
  show.set_defaults(run=_show)


def _train(arguments: argparse.Namespace) -> int:
  out = pathlib.Path(arguments.out).absolute()
  if out.is_dir():
    raise ValueError(f"--out {arguments.out} is a folder: give the file to write")
  if os.path.lexists(out):
    raise ValueError(
      f"--out {arguments.out} exists, and models may have been trained with it: set another file, or "
      "remove it"
    )
  out.parent.mkdir(parents=True, exist_ok=True)  # before the training, which takes minutes
  bad_examples = BadExamples()
  files = find_files(arguments.input)
  lines = sample_lines(files, arguments.text, arguments.max_characters, bad_examples)
  with ctrl_c.entered(ctrl_c.Section("no vocabulary was written")):
    model = train_sentencepiece(lines, arguments.size)
  write_atomically(out, model)
  size = arguments.size
  print(f"{out}: {size} pieces, trained on {len(files)} files; {bad_examples.summary()}")
  print(f"sha256 {hashlib.sha256(model).hexdigest()}")
  print(_GIN_FILE.format(file=str(out), ids=size + 100), end="")
  return 0


def _show(arguments: argparse.Namespace) -> int:
  path = local_path(arguments.model)
  tokenizer = load_sentencepiece(path)
  ids = tokenizer.encode(arguments.text)
  digest = hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
  print(f"{path}: {tokenizer.get_piece_size()} pieces, sha256 {digest}")
  print(f"padding {tokenizer.pad_id()}, end {tokenizer.eos_id()}, unknown {tokenizer.unk_id()}")
  print(" ".join(tokenizer.encode(arguments.text, out_type=str)))
  print(" ".join(map(str, ids)))
  print(tokenizer.decode(ids))
  return 0


def sample_lines(
  files: Sequence[str], text: str, max_characters: int, bad_examples: BadExamples
) -> Iterator[str]:
  """Yields lines of the files' texts; the same files give the same lines.

  Args:
    files: the files to read.
    text: the column with the text, or a template.
    max_characters: about the number of characters to yield; each file has an equal share.
    bad_examples: receives the records that cannot be used.
  """
  reader = BlockReader(make_converter({"text": text}), bad_examples=bad_examples)
  for path in random.Random(0).sample(list(files), len(files)):
    remaining = max_characters // len(files)
    for example in reader.examples(path):
      for line in filter(str.strip, example["text"].splitlines()):
        yield from (line[n : n + _MAX_LINE_LENGTH] for n in range(0, len(line), _MAX_LINE_LENGTH))
        remaining -= len(line)
      if remaining <= 0:
        break
