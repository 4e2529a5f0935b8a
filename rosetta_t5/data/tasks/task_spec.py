"""The specification of a known task: its data, its text format, its objective and its metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from rosetta_t5.data.reading import ReadOptions
from rosetta_t5.data.reading.examples import Convert
from rosetta_t5.data.reading.records import read_records


@dataclasses.dataclass(frozen=True)
class LocalFiles:
  """A dataset's files as they were distributed.

  Attributes:
    folder: the dataset's folder in a data folder.
    splits: file patterns for each split. A split without matching files does not exist.
    names: the names of an example's texts.
    select_texts: converts a record to {name: text}, or returns why it cannot be used; None selects the
      columns called `names`.
    to_example: converts these texts (tensors) to the example that TFDS has.
    read: reads a file's records.
  """

  folder: str
  splits: Mapping[str, tuple[str, ...]]
  names: tuple[str, ...]
  select_texts: Convert | None = None
  to_example: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
  read: Callable[[str, ReadOptions], Any] = read_records


@dataclasses.dataclass(frozen=True)
class TaskSpec:
  """The specification from which a known SeqIO task is built.

  Attributes:
    tfds: "dataset/configuration:version" in TensorFlow Datasets, or "" if TFDS does not have it.
    text_format: converts an example (tensors) as TFDS has it to texts (see `text_formats`).
    files: the same dataset as it was distributed.
    objective: how the texts become training examples (see `text_objectives`).
    splits: the task's splits; None means all splits of the dataset.
    postprocess: converts the model's text to what the metrics compare.
    metrics: functions of targets and predictions.
    source_hint: where to get the data, for the error message if it is missing.
    add_eos: whether inputs and targets end with an end token.
  """

  tfds: str
  text_format: Callable[[Mapping[str, Any]], Mapping[str, Any]]
  files: LocalFiles
  objective: str = "seq2seq"
  splits: tuple[str, ...] | None = None
  postprocess: Callable[..., Any] | None = None
  metrics: tuple[Callable[..., Any], ...] = ()
  source_hint: str = ""
  add_eos: bool = True
