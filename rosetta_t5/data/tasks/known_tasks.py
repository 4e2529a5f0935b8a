"""The known tasks as tables: pretraining, GLUE and other supervised tasks, in T5's text formats."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rosetta_t5.data import task_metrics
from rosetta_t5.data.reading import ReadOptions, make_converter, read_records
from rosetta_t5.data.reading.examples import Convert
from rosetta_t5.data.tasks import text_formats
from rosetta_t5.data.tensorflow_import import tf


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
  names: tuple[str, ...] = ("text",)
  select_texts: Convert | None = None
  to_example: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
  read: Callable[[str, ReadOptions], Any] = read_records

  def find(self, folder: pathlib.Path) -> Mapping[str, list[str]]:
    """Returns the dataset's files in a data folder by split, without splits that have no files."""
    parent, found = folder / self.folder, {}
    for split, patterns in self.splits.items():
      if paths := {str(file) for pattern in patterns for file in parent.glob(pattern)}:
        found[split] = sorted(paths)
    return found


@dataclasses.dataclass(frozen=True)
class TaskSpec:
  """The specification from which a known SeqIO task is built.

  Attributes:
    tfds: "dataset/configuration:version" in TensorFlow Datasets, or "" if TFDS does not have it.
    text_format: converts an example (tensors) as TFDS has it to texts (see `text_formats`).
    files: the same dataset as it was distributed.
    objective: how the texts become training examples (see `objectives`).
    splits: the task's splits; None means all splits of the dataset.
    postprocess: converts the model's text to what the metrics compare.
    metrics: functions of targets and predictions.
    add_eos: whether inputs and targets end with an end token.
  """

  tfds: str
  text_format: Callable[[Mapping[str, Any]], Mapping[str, Any]]
  files: LocalFiles
  objective: str = "seq2seq"
  splits: tuple[str, ...] | None = None
  postprocess: Callable[..., Any] | None = None
  metrics: tuple[Callable[..., Any], ...] = ()
  add_eos: bool = True


# Unlabelled text: the Pile (Gao et al. 2020), C4 (Raffel et al. 2020), Wikitext, LAMBADA.
# Records are {"text": …, "meta": {"pile_set_name": …}}, in 30 training shards and two other files.
PILE_FILES = LocalFiles(
  "the_pile",
  {
    "train": ("train/*.jsonl.zst", "train/*.jsonl"),
    "validation": ("val.jsonl.zst", "val.jsonl", "val/*.jsonl*", "validation*.jsonl*"),
    "test": ("test.jsonl.zst", "test.jsonl", "test/*.jsonl*"),
  },
)
_C4_FILES = LocalFiles(
  "c4/en",
  {
    "train": ("c4-train.*.json.gz", "train*.jsonl*"),
    "validation": ("c4-validation.*.json.gz", "validation*.jsonl*"),
  },
)
_WIKITEXT_FILES = LocalFiles(
  "wikitext",
  {
    split: (f"wiki.{short}.tokens", f"wiki.{short}.raw", f"**/{split}*.parquet", f"{split}*.txt")
    for split, short in (("train", "train"), ("validation", "valid"), ("test", "test"))
  },
)
_LAMBADA_FILES = LocalFiles(
  "lambada",
  {"test": ("lambada_test*.jsonl*", "test*.jsonl*"), "validation": ("*validation*.jsonl*",)},
)
_pile = functools.partial(TaskSpec, "the_pile:1.0.0", text_formats.text_as_targets, PILE_FILES)
_c4 = functools.partial(TaskSpec, "c4/en:2.2.0", text_formats.text_as_targets, _C4_FILES)
_wikitext = functools.partial(TaskSpec, "", text_formats.text_as_targets, _WIKITEXT_FILES)
_lambada_task = functools.partial(TaskSpec, "lambada:1.0.0", files=_LAMBADA_FILES)
_PRETRAINING_TASKS = {
  "the_pile_span_corruption": _pile("span_corruption"),
  "c4_v220_span_corruption": _c4("span_corruption"),
  "c4_v220_prefix_lm": _c4("prefix_lm"),
  "the_pile_lm": _pile("causal_lm"),
  "wikitext": _wikitext("span_corruption"),
  "wikitext_lm": _wikitext("causal_lm"),
  "lambada": _lambada_task(text_format=text_formats.last_word, metrics=(task_metrics.lambada,)),
  # Zero-shot, for decoder-only models: the unchanged passage, then the word that follows it.
  "lambada_eval": _lambada_task(
    text_format=functools.partial(text_formats.last_word, sentinel="", before_word=" "),
    metrics=(task_metrics.next_word, task_metrics.word_perplexity),
    add_eos=False,
  ),
}


# SQuAD (Rajpurkar et al. 2016), translation (WMT) and summaries (CNN/Daily Mail).
_SEPARATOR = "\x1f"  # ASCII's unit separator, which no answer contains


def read_squad(path: str, options: ReadOptions) -> Iterator[tuple[int, Any]]:
  """Yields (number, question) of SQuAD's JSON, with the answers of a question joined to one text."""
  with open(path, encoding="utf-8") as file:
    articles = json.load(file)["data"]
  paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
  questions = [(question, text["context"]) for text in paragraphs for question in text["qas"]]
  for number, (question, context) in enumerate(questions, 1):
    answers = _SEPARATOR.join(answer["text"] for answer in question["answers"])
    texts = {"id": question["id"], "question": question["question"]}
    yield number, {**texts, "context": context, "answers": answers}


def _squad_example(texts: Mapping[str, Any]) -> Mapping[str, Any]:
  answers = tf.strings.split(texts["answers"], _SEPARATOR)
  return {**texts, "answers": {"text": answers}}


_SQUAD = TaskSpec(
  "squad/v1.1:3.0.0",
  text_formats.squad,
  LocalFiles(
    folder="squad",
    splits={"train": ("train*-v1.1.json",), "validation": ("dev-v1.1.json",)},
    names=("id", "question", "context", "answers"),
    to_example=_squad_example,
    read=read_squad,
  ),
  postprocess=text_formats.squad_answers,
  metrics=(task_metrics.squad,),
)


def _files_of_splits(*endings: str) -> dict[str, tuple[str, ...]]:
  splits = ("train", "validation", "test")
  return {split: tuple(f"{split}*{ending}" for ending in endings) for split in splits}


def _paired_files(folder: str, *names: str) -> LocalFiles:
  return LocalFiles(folder, _files_of_splits(".jsonl*", ".tsv", ".parquet"), names)


def _translation(dataset: str, pair: str) -> TaskSpec:
  """Returns a task that translates from English; `pair` is TFDS's name, such as "de-en"."""
  target = pair.removesuffix("-en")
  return TaskSpec(
    f"{dataset}/{pair}:1.0.0",
    functools.partial(text_formats.translate, source="en", target=target),
    _paired_files(f"{dataset}/{pair}", "en", target),
    metrics=(task_metrics.bleu,),
  )


_SUPERVISED_TASKS = {
  "squad_v010_allanswers": _SQUAD,
  "squad_v010_context_free": dataclasses.replace(
    _SQUAD, text_format=functools.partial(text_formats.squad, include_context=False)
  ),
  "cnn_dailymail_v002": TaskSpec(
    "cnn_dailymail:3.4.0",
    functools.partial(text_formats.summarize, article="article", summary="highlights"),
    _paired_files("cnn_dailymail", "article", "highlights"),
    metrics=(task_metrics.rouge,),
  ),
  # T5 translates from English. Its task names have the source language first, TFDS has it last.
  "wmt14_ende_v003": _translation("wmt14_translate", "de-en"),
  "wmt14_enfr_v003": _translation("wmt14_translate", "fr-en"),
  "wmt15_enfr_v003": _translation("wmt15_translate", "fr-en"),
  "wmt16_enro_v003": _translation("wmt16_translate", "ro-en"),
  "wmt19_ende_v003": _translation("wmt19_translate", "de-en"),
  "wmt_t2t_ende_v003": _translation("wmt_t2t_translate", "de-en"),
}


# GLUE (Wang et al. 2019): glue_NAME_v2 (TFDS 2.0.0) and _v002 (TFDS 1.0.0).
_MNLI = ("mnli", ("entailment", "neutral", "contradiction"), ("hypothesis", "premise"))
_ENTAILED = ("entailment", "not_entailment")
_TWO = ("sentence1", "sentence2")
_F1 = (task_metrics.f1_score_with_invalid, task_metrics.accuracy)
_ACCURACY = (task_metrics.accuracy,)
_MATTHEWS = (task_metrics.matthews_corrcoef,)

# For each benchmark: its name in the text, its labels, its columns, its metrics.
GLUE_BENCHMARKS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], tuple[Any, ...]]] = {
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


def _select_glue_texts(
  record: Mapping[str, Any], columns: tuple[str, ...], labels: tuple[str, ...]
) -> Mapping[str, str] | str:
  """Returns the columns' texts and the label's number as text, or why the record cannot be used."""
  others = {column: _OTHER_NAMES.get(column, column) for column in columns}
  names = {c: other if other in record and c not in record else c for c, other in others.items()}
  texts = make_converter(names)(record)
  if isinstance(texts, str):
    return texts
  given = (record[name] for name in _LABEL_COLUMNS if record.get(name) not in (None, ""))
  label = next(given, _NO_LABEL)
  if label == "-":  # MultiNLI's mark for an example on which its annotators did not agree.
    return "no gold label"
  number = labels.index(label) if label in labels else label
  idx = record.get("idx", record.get("index", _NO_LABEL))
  return {**texts, "label": str(number), "idx": str(idx)}


def _glue_example(texts: Mapping[str, Any], label_dtype: str) -> Mapping[str, Any]:
  idx = tf.strings.to_number(texts["idx"], tf.int32)
  label = tf.strings.to_number(texts["label"], tf.float32)
  return {**texts, "label": tf.cast(label, label_dtype), "idx": idx}


def _glue_files(name: str, columns: tuple[str, ...], labels: tuple[str, ...]) -> LocalFiles:
  splits = _files_of_splits(".tsv", ".jsonl*", ".parquet", ".csv")
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
    select_texts=functools.partial(_select_glue_texts, columns=columns, labels=labels),
    names=(*columns, "label", "idx"),
    to_example=functools.partial(_glue_example, label_dtype="int64" if labels else "float32"),
  )


def _glue_task(name: str, version: str) -> TaskSpec:
  benchmark, labels, columns, metric_fns = GLUE_BENCHMARKS[name]
  text_format, postprocess = text_formats.stsb, text_formats.string_to_float
  if labels:
    text_format = functools.partial(text_formats.glue, benchmark=benchmark, labels=labels)
    postprocess = functools.partial(text_formats.label_to_class, label_classes=labels)
  return TaskSpec(
    f"glue/{name}:{version}",
    text_format,
    _glue_files(name, columns, labels),
    splits=("test",) if name == "ax" else None,
    postprocess=postprocess,
    metrics=metric_fns,
  )


_GLUE_TASKS = {
  f"glue_{name}_{suffix}": _glue_task(name, version)
  for suffix, version in (("v2", "2.0.0"), ("v002", "1.0.0"))
  for name in GLUE_BENCHMARKS
}

TASKS: Mapping[str, TaskSpec] = {**_PRETRAINING_TASKS, **_GLUE_TASKS, **_SUPERVISED_TASKS}
