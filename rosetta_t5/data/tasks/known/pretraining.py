"""Unlabelled text: the Pile (Gao et al. 2020), C4 (Raffel et al. 2020), Wikitext, LAMBADA."""

from __future__ import annotations

import functools

from rosetta_t5.data import task_metrics
from rosetta_t5.data.tasks import text_formats
from rosetta_t5.data.tasks.task_spec import LocalFiles, TaskSpec


def _text_files(folder: str, **splits: tuple[str, ...]) -> LocalFiles:
  return LocalFiles(folder, splits, names=("text",))


# Records are {"text": …, "meta": {"pile_set_name": …}}, in 30 training shards and two other files.
PILE_FILES = _text_files(
  "the_pile",
  train=("train/*.jsonl.zst", "train/*.jsonl"),
  validation=("val.jsonl.zst", "val.jsonl", "val/*.jsonl*", "validation*.jsonl*"),
  test=("test.jsonl.zst", "test.jsonl", "test/*.jsonl*"),
)
_C4_FILES = _text_files(
  "c4/en",
  train=("c4-train.*.json.gz", "train*.jsonl*"),
  validation=("c4-validation.*.json.gz", "validation*.jsonl*"),
)
_WIKITEXT_FILES = _text_files(
  "wikitext",
  train=("wiki.train.tokens", "wiki.train.raw", "**/train*.parquet", "train*.txt"),
  validation=("wiki.valid.tokens", "wiki.valid.raw", "**/validation*.parquet", "validation*.txt"),
  test=("wiki.test.tokens", "wiki.test.raw", "**/test*.parquet", "test*.txt"),
)
_LAMBADA_FILES = _text_files(
  "lambada", test=("lambada_test*.jsonl*", "test*.jsonl*"), validation=("*validation*.jsonl*",)
)

_PILE_HINT = (
  "The Pile's public copy is gone: python scripts_gpu/download_the_pile.py lists the alternatives"
)
_C4_HINT = "C4 is at huggingface.co/datasets/allenai/c4, or is built by TFDS: tfds build c4/en"
_LAMBADA_HINT = "LAMBADA: python scripts_gpu/download_lambada.py prints where to get it"
_WIKITEXT_HINT = "Wikitext is at huggingface.co/datasets/Salesforce/wikitext"
# For each corpus: its TFDS dataset, its files, and where to get it.
_CORPORA = {
  "pile": ("the_pile:1.0.0", PILE_FILES, _PILE_HINT),
  "c4": ("c4/en:2.2.0", _C4_FILES, _C4_HINT),
  "wikitext": ("", _WIKITEXT_FILES, _WIKITEXT_HINT),
}


def _corpus_task(corpus: str, objective: str) -> TaskSpec:
  tfds, files, hint = _CORPORA[corpus]
  return TaskSpec(tfds, text_formats.text_as_targets, files, objective, source_hint=hint)


_lambada_task = functools.partial(
  TaskSpec, "lambada:1.0.0", files=_LAMBADA_FILES, source_hint=_LAMBADA_HINT
)

TASKS = {
  "the_pile_span_corruption": _corpus_task("pile", "span_corruption"),
  "c4_v220_span_corruption": _corpus_task("c4", "span_corruption"),
  "c4_v220_prefix_lm": _corpus_task("c4", "prefix_lm"),
  "the_pile_lm": _corpus_task("pile", "causal_lm"),
  "wikitext": _corpus_task("wikitext", "span_corruption"),
  "wikitext_lm": _corpus_task("wikitext", "causal_lm"),
  "lambada": _lambada_task(text_format=text_formats.last_word, metrics=(task_metrics.lambada,)),
  # Zero-shot, for decoder-only models: the unchanged passage, then the word that follows it.
  "lambada_eval": _lambada_task(
    text_format=functools.partial(text_formats.last_word, sentinel="", before_word=" "),
    metrics=(task_metrics.next_word, task_metrics.word_perplexity),
    add_eos=False,
  ),
}
