"""GLUE (Wang et al. 2019) in T5's text formats: glue_NAME_v2 (TFDS 2.0.0) and _v002 (1.0.0)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from rosetta_t5.data import metrics
from rosetta_t5.data.tasks import postprocessing, text_formats
from rosetta_t5.data.tasks.task_recipe import LocalFiles, TaskRecipe

_MNLI = ("entailment", "neutral", "contradiction")
_ENTAILED = ("entailment", "not_entailment")
_TWO = ("sentence1", "sentence2")
_F1 = (metrics.f1_score_with_invalid, metrics.accuracy)
_ACCURACY = (metrics.accuracy,)

# Each benchmark: the name in its text, its labels, its columns, its metrics.
BENCHMARKS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], tuple[Any, ...]]] = {
  "cola": ("cola", ("unacceptable", "acceptable"), ("sentence",), (metrics.matthews_corrcoef,)),
  "sst2": ("sst2", ("negative", "positive"), ("sentence",), _ACCURACY),
  "mrpc": ("mrpc", ("not_equivalent", "equivalent"), _TWO, _F1),
  "qqp": ("qqp", ("not_duplicate", "duplicate"), ("question1", "question2"), _F1),
  "stsb": ("stsb", (), _TWO, (metrics.pearson_corrcoef, metrics.spearman_corrcoef)),
  "mnli": ("mnli", _MNLI, ("hypothesis", "premise"), _ACCURACY),
  "mnli_matched": ("mnli", _MNLI, ("hypothesis", "premise"), _ACCURACY),
  "mnli_mismatched": ("mnli", _MNLI, ("hypothesis", "premise"), _ACCURACY),
  "qnli": ("qnli", _ENTAILED, ("question", "sentence"), _ACCURACY),
  "rte": ("rte", _ENTAILED, _TWO, _ACCURACY),
  "wnli": ("wnli", ("not_entailment", "entailment"), _TWO, _ACCURACY),
  "ax": ("mnli", _MNLI, ("hypothesis", "premise"), ()),  # the diagnostic set has no labels
}
# Other names of the columns: GLUE's own tsv files, MultiNLI's, and Hugging Face's.
_OTHER_NAMES = {
  "hypothesis": ("sentence2",),
  "premise": ("sentence1",),
  "question1": ("sentence1",),
  "question2": ("sentence2",),
}
_LABELS = ("label", "gold_label", "score", "is_duplicate", "Quality")
NO_LABEL = -1


def _pick(
  columns: tuple[str, ...], labels: tuple[str, ...], record: Mapping[str, Any]
) -> dict[str, str] | str:
  """Takes the columns under any of their names, and the label as its number's text."""
  texts = {}
  for column in columns:
    names = [name for name in (column, *_OTHER_NAMES.get(column, ())) if name in record]
    if not names:
      return f"no column {column!r} among {', '.join(map(repr, record))}"[:200]
    texts[column] = str(record[names[0]] or "")
    if not texts[column].strip():
      return f"{column} is empty"
  given = next((record[name] for name in _LABELS if record.get(name) not in (None, "")), NO_LABEL)
  if str(given) == "-":  # MultiNLI: the annotators did not agree
    return "no gold label"
  texts["label"] = str(labels.index(given) if given in labels else given)
  try:
    number = float(texts["label"])
  except ValueError:
    return f"the label {given!r} is none of {', '.join(labels)}"
  if labels and not (NO_LABEL <= number < len(labels) and number == int(number)):
    return f"the label {given!r} is none of {', '.join(labels)}"
  texts["idx"] = str(record.get("idx", record.get("index", NO_LABEL)))
  return texts


def _to_example(kind: str, texts: Mapping[str, Any]) -> Mapping[str, Any]:
  from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_tensorflow

  tf = import_tensorflow()
  idx = tf.strings.to_number(texts["idx"], tf.int32)
  label = tf.strings.to_number(texts["label"], tf.float32)
  return {**texts, "label": tf.cast(label, kind), "idx": idx}


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
    pick=functools.partial(_pick, columns, labels),
    names=(*columns, "label", "idx"),
    to_example=functools.partial(_to_example, "int64" if labels else "float32"),
  )


def _recipe(name: str, version: str) -> TaskRecipe:
  benchmark, labels, columns, metric_fns = BENCHMARKS[name]
  is_score = not labels
  return TaskRecipe(
    f"glue/{name}:{version}",
    text_formats.stsb() if is_score else text_formats.glue(benchmark, labels),
    _files(name, columns, labels),
    splits=("test",) if name == "ax" else None,
    postprocess=postprocessing.string_to_float
    if is_score
    else postprocessing.label_to_class(labels),
    metrics=metric_fns,
    where=f"GLUE: tfds build glue/{name}, on a machine that reaches dl.fbaipublicfiles.com",
  )


TASKS = {
  f"glue_{name}_{suffix}": _recipe(name, version)
  for suffix, version in (("v2", "2.0.0"), ("v002", "1.0.0"))
  for name in BENCHMARKS
}
