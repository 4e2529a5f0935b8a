"""Where a gs:// path lies on this machine: vocabularies that recipes name by their public paths.

ROSETTA_T5_ASSETS says it: a folder that holds what was copied (t5-data/vocabs/…, or the part after
the bucket), or entries `gs://what=/where`, of files or folders, with commas between them.
"""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any

VARIABLE = "ROSETTA_T5_ASSETS"
_EXTRA_IDS = re.compile(r"\.(\d+)extra$")


def local_path(path: str) -> str:
  """Returns the local file that stands for a gs:// path, or a path that is local as it is.

  Raises:
    ValueError: a file does not exist; the text says what was looked for and what to set.
  """
  if not path.startswith("gs://"):
    if not os.path.exists(path) and "://" not in path:
      raise ValueError(
        f"There is no vocabulary file {path}: set "
        "seqio.SentencePieceVocabulary.sentencepiece_model_file to one that is there, or train "
        "one: rosetta-t5 vocab train --input 'TEXT*.txt' --size 32000 --out vocabulary.model"
      )
    return path
  places = _candidates(path, os.environ.get(VARIABLE, ""))
  for place in places:
    if place.exists():
      return str(place)
  looked = f" Looked for {', '.join(map(str, places))}." if places else ""
  raise ValueError(
    f"{path} is not on this machine, and is not fetched.{looked} Copy it here and set the "
    f"environment variable {VARIABLE}='{path}=/path/of/the/copy' (or to a folder that holds "
    f"{path.removeprefix('gs://')}), or name a local file in the gin file: "
    "seqio.SentencePieceVocabulary.sentencepiece_model_file = '/path/of/the/copy'"
  )


def _candidates(path: str, setting: str) -> list[pathlib.Path]:
  """Every place where `path` may lie, the most exact first."""
  bucket_path = path.removeprefix("gs://")
  in_bucket = bucket_path.partition("/")[2]
  places: list[pathlib.Path] = []
  for entry in filter(None, setting.split(",")):
    prefix, equals, place = entry.strip().rpartition("=")
    if not equals:
      places += [pathlib.Path(place, bucket_path), pathlib.Path(place, in_bucket)]
      places.append(pathlib.Path(place, *pathlib.PurePosixPath(in_bucket).parts[-2:]))
    elif path == prefix:
      places.insert(0, pathlib.Path(place))
    elif path.startswith(prefix.rstrip("/") + "/"):
      places.append(pathlib.Path(place, path.removeprefix(prefix.rstrip("/") + "/")))
  return places


def promised_extra_ids(path: str) -> int:
  """How many extra ids a vocabulary's folder says that its model holds (".100extra"), or 0."""
  found = _EXTRA_IDS.search(pathlib.PurePosixPath(path).parent.name)
  return int(found.group(1)) if found else 0


def read_local_vocabularies(vocabularies: Any) -> None:
  """Makes SeqIO's SentencePiece vocabularies read `local_path` of their file, once.

  A path such as …/cc_all.32000.100extra/sentencepiece.model promises 100 sentinels. Copies of T5's
  model made elsewhere often lack them; then they are added, so that span corruption and the
  embedding table see the 32,100 ids that the path means.

  Args:
    vocabularies: the module seqio.vocabularies.
  """
  load = vocabularies._load_model
  if getattr(load, "reads_local_assets", False):
    return

  def load_local(path: str, extra_ids: int, *options: Any) -> Any:
    file = local_path(os.fspath(path))
    context = load(file, extra_ids, *options)
    promised = promised_extra_ids(os.fspath(path))
    if extra_ids or not promised or _has_sentinels(context.tokenizer):
      return context
    return load(file, promised, *options)

  load_local.reads_local_assets = True  # type: ignore[attr-defined]
  vocabularies._load_model = load_local


def _has_sentinels(tokenizer: Any) -> bool:
  last = tokenizer.IdToPiece(tokenizer.GetPieceSize() - 1)
  return "extra_id" in last
