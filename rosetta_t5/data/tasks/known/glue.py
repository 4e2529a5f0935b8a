"""GLUE (Wang et al. 2019) in T5's text formats: glue_NAME_v2 (TFDS 2.0.0) and _v002 (TFDS 1.0.0)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from rosetta_t5.data import task_metrics
from rosetta_t5.data.tasks import text_formats
from rosetta_t5.data.tasks.task_spec import LocalFiles, TaskSpec
from rosetta_t5.data.tensorflow_import import tf

_MNLI = ("mnli", ("entailment", "neutral", "contradiction"), ("hypothesis", "premise"))
_ENTAILED = ("entailment", "not_entailment")
_TWO = ("sentence1", "sentence2")
_F1 = (task_metrics.f1_score_with_invalid, task_metrics.accuracy)
_ACCURACY = (task_metrics.accuracy,)
_MATTHEWS = (task_metrics.matthews_corrcoef,)

# For each benchmark: its name in the text, its labels, its columns, its metrics.
BENCHMARKS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], tuple[Any, ...]]] = {
  "cola": ("cola", ("unacceptable", "acceptable"), ("sentence",), _MATTHEWS),
  "sst2": ("sst2", ("negative", "positive"), ("sentence",), _ACCURACY),
  "mrpc": ("mrpc", ("not_equivalent", "equivalent"), _TWO, _F1),
  "qqp": ("qqp", ("not_duplicate", "duplicate"), ("question1", "question2"), _F1),
  "stsb": ("stsb", (), _TWO, (task_metrics.pearson_corrcoef, task_metrics.spearman_corrcoef)),
  "mnli": (*_MNLI, _ACCURACY),
  "mnli_matched": (*_MNLI, _ACCURACY),
  "mnli_mismatched": (*_MNLI, _ACCURACY),
  "qnli": ("qnli", _ENTAILED, ("question", "sentence"), _ACCURACY),
  "rte": ("rte", _ENTAILED, _TWO, _ACCURACY),
  "wnli": ("wnli", ("not_entailment", "entailment"), _TWO, _ACCURACY),
  "ax": (*_MNLI, ()),  # the diagnostic set has no labels
}
# The columns' names in GLUE's own tsv files, in MultiNLI's files and on Hugging Face.
_OTHER_NAMES = {
  "hypothesis": "sentence2",
  "premise": "sentence1",
  "question1": "sentence1",
  "question2": "sentence2",
}
_LABEL_COLUMNS = ("label", "gold_label", "score", "is_duplicate", "Quality")
_NO_LABEL = -1


def _select_texts(
  record: Mapping[str, Any], columns: tuple[str, ...], labels: tuple[str, ...]
) -> dict[str, str] | str:
  """Returns the columns' texts and the label's number as text, or why the record cannot be used."""
  texts = {}
  for column in columns:
    name = column if column in record else _OTHER_NAMES.get(column, column)
    if name not in record:
      return f"no column {column!r} among {', '.join(map(repr, record))}"[:200]
    texts[column] = str(record[name] or "")
    if not texts[column].strip():
      return f"{column} is empty"
  given = [record[name] for name in _LABEL_COLUMNS if record.get(name) not in (None, "")]
  label = given[0] if given else _NO_LABEL
  if label == "-":  # MultiNLI's mark for an example on which its annotators did not agree.
    return "no gold label"
  texts["label"] = str(labels.index(label) if label in labels else label)
  if not _is_label(texts["label"], labels):
    return f"the label must be one of {', '.join(labels)}, got {label!r}"
  texts["idx"] = str(record.get("idx", record.get("index", _NO_LABEL)))
  return texts


def _is_label(text: str, labels: tuple[str, ...]) -> bool:
  """Returns whether a text is a label's number or _NO_LABEL, or any number if there are no labels."""
  try:
    number = float(text)
  except ValueError:
    return False
  return not labels or number in range(_NO_LABEL, len(labels))


def _to_example(texts: Mapping[str, Any], label_dtype: str) -> Mapping[str, Any]:
  idx = tf.strings.to_number(texts["idx"], tf.int32)
  label = tf.strings.to_number(texts["label"], tf.float32)
  return {**texts, "label": tf.cast(label, label_dtype), "idx": idx}


def _files(name: str, columns: tuple[str, ...], labels: tuple[str, ...]) -> LocalFiles:
  splits: dict[str, tuple[str, ...]] = {
    split: (f"{split}*.tsv", f"{split}*.jsonl*", f"{split}*.parquet", f"{split}*.csv")
    for split in ("train", "validation", "test")
  }
  if name == "mnli":
    del splits["validation"], splits["test"]
    for part in ("matched", "mismatched"):
      dev = (f"dev_{part}*", f"multinli_1.0_dev_{part}.*", f"mnli_dev_{part}*")
      splits[f"validation_{part}"] = (f"validation_{part}*", *dev)
      splits[f"test_{part}"] = (f"test_{part}*",)
  else:
    splits["validation"] += ("dev*.tsv",)
  return LocalFiles(
    folder=f"glue/{name}",
    splits=splits,
    select_texts=functools.partial(_select_texts, columns=columns, labels=labels),
    names=(*columns, "label", "idx"),
    to_example=functools.partial(_to_example, label_dtype="int64" if labels else "float32"),
  )


def _task(name: str, version: str) -> TaskSpec:
  benchmark, labels, columns, metric_fns = BENCHMARKS[name]
  text_format, postprocess = text_formats.stsb, text_formats.string_to_float
  if labels:
    text_format = functools.partial(text_formats.glue, benchmark=benchmark, labels=labels)
    postprocess = functools.partial(text_formats.label_to_class, label_classes=labels)
  return TaskSpec(
    f"glue/{name}:{version}",
    text_format,
    _files(name, columns, labels),
    splits=("test",) if name == "ax" else None,
    postprocess=postprocess,
    metrics=metric_fns,
    source_hint=f"GLUE: tfds build glue/{name}, on a machine that reaches dl.fbaipublicfiles.com",
  )


TASKS = {
  f"glue_{name}_{suffix}": _task(name, version)
  for suffix, version in (("v2", "2.0.0"), ("v002", "1.0.0"))
  for name in BENCHMARKS
}
