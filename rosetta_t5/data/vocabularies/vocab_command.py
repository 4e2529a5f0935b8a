"""`rosetta-t5 vocab`: trains a SentencePiece vocabulary on files, or shows how one encodes a text."""

import argparse
import pathlib
import random
import string
from collections import Counter
from collections.abc import Iterator, Sequence

from rosetta_t5.data.reading import BadExamples, BlockReader, find_files, make_converter
from rosetta_t5.data.tensorflow_import import import_seqio
from rosetta_t5.data.vocabularies import sentencepiece_models
from rosetta_t5.files import write_atomically
from rosetta_t5.terminal import machine_path, positive_integer

_MAX_LINE_LENGTH = 4000  # characters
_MAX_CHARACTERS = 200_000_000  # of the sample
_CHECKED_TEXTS = 500  # number of texts that are encoded and decoded to see what they lose
_SMALL = 1000  # pieces; 256 bytes would be too many of a smaller vocabulary
_OPTIONS = (  # of SentencePiece's trainer, https://github.com/google/sentencepiece/blob/master/doc/options.md
  *("byte_fallback", "character_coverage", "required_chars", "user_defined_symbols", "model_type"),
  *("normalization_rule_name", "remove_extra_whitespaces", "allow_whitespace_only_pieces"),
  "split_digits",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 vocab`."""
  verbs = parser.add_subparsers(required=True, metavar="{train,show}")
  train = verbs.add_parser("train", help="train a vocabulary with T5's special ids")
  add = train.add_argument
  add("--input", nargs="+", required=True, metavar="GLOB")
  add("--size", type=positive_integer, default=32000, help="pieces, without the sentinels")
  add("--out", type=machine_path, required=True, help="the new file, such as vocabulary.model")
  add("--text-key", default="text", help="column or template")
  for name in _OPTIONS:
    add(f"--{name}", help="as in SentencePiece's spm_train", metavar="VALUE")
  train.set_defaults(run=_train)
  show = verbs.add_parser("show", help="show the pieces and ids of a text")
  show.add_argument("model")
  show.add_argument("text", nargs="?", default="The quick brown fox, déjà vu: 3.14 ≈ π.")
  show.add_argument("--extra_ids", type=int, default=100, help="sentinels to add (default: 100)")
  show.set_defaults(run=_show)


def _train(arguments: argparse.Namespace) -> int:
  out, size = pathlib.Path(arguments.out).absolute(), arguments.size
  if out.exists():
    raise ValueError(
      f"--out {arguments.out} exists, and models may have been trained with it: set another file, or "
      "remove it"
    )
  out.parent.mkdir(parents=True, exist_ok=True)  # before the training, which takes minutes
  bad_examples = BadExamples()
  files = find_files(arguments.input)
  # With these options, a vocabulary loses no character of its text.
  options = {"character_coverage": "1.0"}
  if size >= _SMALL:
    ascii_characters = string.digits + string.ascii_letters + string.punctuation
    options = {"byte_fallback": "true", "required_chars": ascii_characters}
  given = {name: getattr(arguments, name) for name in _OPTIONS}
  options |= {name: value for name, value in given.items() if value is not None}
  checked: list[str] = []
  lines = _sample_lines(files, arguments.text_key, bad_examples, checked)
  write_atomically(out, sentencepiece_models.train_sentencepiece(lines, size, options))
  left_out = bad_examples.counts.total()
  print(f"{out}: {size} pieces, trained on {len(files)} files; {left_out} bad examples left out")
  tokenizer = sentencepiece_models.load_sentencepiece(out)
  counts = sum((sentencepiece_models.count_lost(text, tokenizer) for text in checked), Counter())
  print(*sentencepiece_models.describe_lost(counts), sep="\n")
  for problem in sentencepiece_models.lost_text_problems(counts):
    print(f"note: {problem}")
  print(
    "In a gin file:\n\nfrom __gin__ import dynamic_registration\nimport seqio\n\n"
    f"seqio.SentencePieceVocabulary.sentencepiece_model_file = {str(out)!r}\n"
    f"seqio.SentencePieceVocabulary.extra_ids = 100  # {size + 100} ids in total"
  )
  return 0


def _show(arguments: argparse.Namespace) -> int:
  vocabulary = import_seqio().SentencePieceVocabulary(arguments.model, arguments.extra_ids)
  tokenizer = vocabulary.tokenizer
  ids = tokenizer.encode(arguments.text)
  sentinels = sentencepiece_models.count_extra_pieces(tokenizer)
  pieces = tokenizer.get_piece_size() - sentinels
  print(f"{arguments.model}: {pieces} pieces and {sentinels} sentinels")
  print(f"padding 0, end {tokenizer.eos_id()}, unknown {tokenizer.unk_id()}")
  print(*tokenizer.encode(arguments.text, out_type=str))
  print(*ids)
  print(tokenizer.decode(ids))
  return 0


def _sample_lines(
  files: Sequence[str], template: str, bad: BadExamples, checked: list[str]
) -> Iterator[str]:
  """Yields lines of the files' texts; the same files give the same lines.

  Args:
    files: the files to read.
    template: the column with the text, or a template.
    bad: receives the records that cannot be used.
    checked: receives the beginnings of some texts: the first ones of each file.
  """
  reader = BlockReader(make_converter({"text": template}), bad_examples=bad)
  for number, path in enumerate(random.Random(0).sample(list(files), len(files)), 1):
    remaining = _MAX_CHARACTERS // len(files)
    for text in (example["text"] for example in reader.examples(path)):
      if len(checked) < _CHECKED_TEXTS * number // len(files):
        checked.append(text[:_MAX_LINE_LENGTH])
      for line in filter(str.strip, text.splitlines()):
        yield from (line[n : n + _MAX_LINE_LENGTH] for n in range(0, len(line), _MAX_LINE_LENGTH))
        remaining -= len(line)
      if remaining <= 0:
        break
