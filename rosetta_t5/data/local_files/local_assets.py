"""Finds local copies of vocabularies that recipes name by public gs:// paths.

The environment variable ROSETTA_T5_ASSETS lists where the copies are, separated by commas. An entry is
a folder that holds the copies (t5-data/vocabs/…, with or without the bucket's name, or only the last
folder and file of a path), or a mapping
`gs://path=/local/path` of one file or folder.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

T5_VOCABULARY = "gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model"
VARIABLE = "ROSETTA_T5_ASSETS"
_EXTRA_IDS = re.compile(r"\.(\d+)extra$")  # at the end of a folder's name


def local_path(path: str) -> str:
  """Returns the local copy of a gs:// path. Other paths are returned unchanged.

  Raises:
    ValueError: the file does not exist. The message lists the paths searched and what to set.
  """
  if not path.startswith("gs://"):
    if not os.path.isfile(path) and "://" not in path:  # a device or a pipe would never end
      raise ValueError(
        f"There is no vocabulary file {path}: give the path of an existing one, or train one: "
        "rosetta-t5 vocab train --input 'TEXT*.txt' --size 32000 --out vocabulary.model"
      )
    return path
  candidates = _candidates(path, os.environ.get(VARIABLE, ""))
  for candidate in candidates:
    if candidate.exists():
      return str(candidate)
  searched = f" Looked for {', '.join(map(str, candidates))}." if candidates else ""
  raise ValueError(
    f"{path} is not on this machine, and files are never downloaded.{searched} Copy it here and set "
    f"the environment variable {VARIABLE}='{path}=/path/of/the/copy' (or to a folder that holds "
    f"{path.removeprefix('gs://')}), or give a local path instead (in a gin file: "
    "seqio.SentencePieceVocabulary.sentencepiece_model_file = '/path/of/the/copy')"
  )


def add_copy(path: str, copy: str | os.PathLike[str]) -> None:
  """Adds a local copy of a gs:// path, which is used if the environment variable names no other."""
  entries = [os.environ.get(VARIABLE, ""), f"{path}={os.fspath(copy)}"]
  os.environ[VARIABLE] = ",".join(filter(None, entries))


def _candidates(path: str, setting: str) -> list[pathlib.Path]:
  """Returns every local path that may hold a copy of `path`: a mapping of the whole path comes first."""
  bucket_path = path.removeprefix("gs://")
  path_in_bucket = bucket_path.partition("/")[2]
  candidates: list[pathlib.Path] = []
  for entry in filter(None, setting.split(",")):
    prefix, equals, target = entry.strip().rpartition("=")
    if not equals:
      last_two_parts = "/".join(path_in_bucket.split("/")[-2:])
      suffixes = (bucket_path, path_in_bucket, last_two_parts)
      candidates += [pathlib.Path(target, suffix) for suffix in suffixes]
    elif path == prefix:
      candidates.insert(0, pathlib.Path(target))
    elif path.startswith(prefix.rstrip("/") + "/"):
      candidates.append(pathlib.Path(target, path.removeprefix(prefix.rstrip("/") + "/")))
  return candidates


def load_sentencepiece(path: str | os.PathLike[str]) -> Any:
  """Returns the `SentencePieceProcessor` of a .model file.

  Raises:
    ValueError: the file is not a SentencePiece model.
  """
  import sentencepiece

  with contextlib.suppress(RuntimeError):
    processor = sentencepiece.SentencePieceProcessor(
      model_proto=pathlib.Path(path).read_bytes(), num_threads=1
    )
    if processor.get_piece_size():  # An empty file is loaded as a model without pieces.
      return processor
  raise ValueError(f"{path} is not a SentencePiece model, or is damaged: give another file")


def load_vocabulary_model(
  load: Callable[..., Any], path: str | os.PathLike[str], extra_ids: int, *options: Any
) -> Any:
  """Loads a SentencePiece model from its local copy, with the extra ids that its path announces.

  The path …/cc_all.32000.100extra/sentencepiece.model announces 100 sentinels, but many copies of
  T5's model lack them. They are added here, so that span corruption and the embedding table use all
  32,100 ids.

  Args:
    load: SeqIO's function, called with the local path, the number of extra ids and the options.
    path: the model's path, which may start with gs://.
    extra_ids: the number of extra ids that the vocabulary requests; 0 means the number in the path.
    *options: passed on to `load`.

  Raises:
    ValueError: the file does not exist or is not a SentencePiece model.
  """
  file = local_path(os.fspath(path))
  load_sentencepiece(file)  # raises an error that names a damaged file
  context = load(file, extra_ids, *options)
  announced = announced_extra_ids(path)
  last_piece = context.tokenizer.IdToPiece(context.tokenizer.GetPieceSize() - 1)
  if extra_ids or not announced or "extra_id" in last_piece:
    return context
  return load(file, announced, *options)


def announced_extra_ids(path: str | os.PathLike[str]) -> int:
  """Returns the number of extra ids that the folder of a vocabulary announces, or 0."""
  announced = _EXTRA_IDS.search(pathlib.PurePosixPath(path).parent.name)
  return int(announced[1]) if announced else 0
