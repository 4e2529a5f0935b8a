"""A known task as data: where its examples lie, how they become text, how answers are judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from rosetta_t5.data.reading import Layout
from rosetta_t5.data.reading.records import Located, read_records

# From a record as it was distributed to the texts of an example, or the reason why it has none.
Pick = Callable[[Mapping[str, Any]], "dict[str, str] | str"]


@dataclasses.dataclass(frozen=True)
class LocalFiles:
  """A dataset's files as they were distributed, in a folder of its own.

  Attributes:
    folder: its name in the data folder.
    splits: for each split patterns; those that match nothing are left out.
    pick: which texts of a record are used.
    names: the texts' names.
    to_example: from these texts (tensors) to the example that TFDS would give.
    read: reads a file's records.
    layout: columns of files without names.
  """

  folder: str
  splits: Mapping[str, tuple[str, ...]]
  pick: Pick
  names: tuple[str, ...]
  to_example: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
  read: Callable[[str, Layout], Any] = read_records
  layout: Layout = dataclasses.field(default_factory=Layout)


@dataclasses.dataclass(frozen=True)
class TaskRecipe:
  """What SeqIO's task of one name is made of.

  Attributes:
    tfds: dataset, configuration and version in TensorFlow Datasets, or "" if it is not there.
    text_format: from examples to texts.
    files: the same dataset as files.
    objective: made of the texts (see `objectives`).
    splits: those that there are; None for all of the dataset's.
    postprocess: from a text to what the metrics compare.
    metrics: functions of targets and predictions.
    where: where it comes from, for whoever has neither.
    add_eos: whether inputs and targets end with an end token.
  """

  tfds: str
  text_format: Callable[[Any], Any]
  files: LocalFiles | None = None
  objective: str = "seq2seq"
  splits: tuple[str, ...] | None = None
  postprocess: Callable[..., Any] | None = None
  metrics: tuple[Callable[..., Any], ...] = ()
  where: str = ""
  add_eos: bool = True


def pick_columns(**columns: str) -> Pick:
  """Returns a `pick` of {name: column}; other records are bad."""

  def pick(record: Mapping[str, Any]) -> dict[str, str] | str:
    missing = [column for column in columns.values() if column not in record]
    if missing:
      return f"no column {missing[0]!r} among {', '.join(map(repr, record))}"[:200]
    texts = {name: record[column] for name, column in columns.items()}
    if not all(isinstance(text, str) and text.strip() for text in texts.values()):
      empty = [name for name, text in texts.items() if not str(text or "").strip()]
      return f"{empty[0]} is empty" if empty else "a column that is no text"
    return texts

  return pick


__all__ = ["LocalFiles", "Located", "Pick", "TaskRecipe", "pick_columns"]
