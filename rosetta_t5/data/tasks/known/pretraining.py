"""Unlabelled text: the Pile (Gao et al. 2020), C4 (Raffel et al. 2020), Wikitext, LAMBADA."""

from __future__ import annotations

from rosetta_t5.data import metrics
from rosetta_t5.data.tasks import text_formats
from rosetta_t5.data.tasks.task_recipe import LocalFiles, TaskRecipe, pick_columns

TEXT = pick_columns(text="text")

PILE_FILES = LocalFiles(
  folder="the_pile",
  splits={
    # {"text": …, "meta": {"pile_set_name": …}}, 30 shards and two files, as they were distributed.
    "train": ("train/*.jsonl.zst", "train/*.jsonl"),
    "validation": ("val.jsonl.zst", "val.jsonl", "val/*.jsonl*", "validation*.jsonl*"),
    "test": ("test.jsonl.zst", "test.jsonl", "test/*.jsonl*"),
  },
  pick=TEXT,
  names=("text",),
)
C4_FILES = LocalFiles(
  folder="c4/en",
  splits={
    "train": ("c4-train.*.json.gz", "train*.jsonl*"),
    "validation": ("c4-validation.*.json.gz", "validation*.jsonl*"),
  },
  pick=TEXT,
  names=("text",),
)
WIKITEXT_FILES = LocalFiles(
  folder="wikitext",
  splits={
    split: (f"wiki.{short}.tokens", f"wiki.{short}.raw", f"**/{split}*.parquet", f"{split}*.txt")
    for split, short in (("train", "train"), ("validation", "valid"), ("test", "test"))
  },
  pick=TEXT,
  names=("text",),
)
LAMBADA_FILES = LocalFiles(
  folder="lambada",
  splits={"test": ("lambada_test*.jsonl*", "test*.jsonl*"), "validation": ("*validation*.jsonl*",)},
  pick=TEXT,
  names=("text",),
)
_C4 = "C4 is at huggingface.co/datasets/allenai/c4, or made by TFDS: tfds build c4/en"
_LAMBADA = "LAMBADA: python scripts_gpu/download_lambada.py says where it is"
_WIKITEXT = "Wikitext is at huggingface.co/datasets/Salesforce/wikitext"


def _corpus(tfds: str, files: LocalFiles, objective: str, where: str) -> TaskRecipe:
  return TaskRecipe(tfds, text_formats.text_as_targets(), files, objective, where=where)


TASKS = {
  "the_pile_span_corruption": _corpus(
    "the_pile:1.0.0",
    PILE_FILES,
    "span_corruption",
    "The Pile's public copy is gone: python scripts_gpu/download_the_pile.py says what there is",
  ),
  "c4_v220_span_corruption": _corpus("c4/en:2.2.0", C4_FILES, "span_corruption", _C4),
  "c4_v220_prefix_lm": _corpus("c4/en:2.2.0", C4_FILES, "prefix_lm", _C4),
  "the_pile_lm": _corpus(
    "the_pile:1.0.0",
    PILE_FILES,
    "causal_lm",
    "The Pile's public copy is gone: python scripts_gpu/download_the_pile.py says what there is",
  ),
  "wikitext": _corpus("", WIKITEXT_FILES, "span_corruption", _WIKITEXT),
  "wikitext_lm": _corpus("", WIKITEXT_FILES, "causal_lm", _WIKITEXT),
  "lambada": TaskRecipe(
    "lambada:1.0.0",
    text_formats.last_word(),
    LAMBADA_FILES,
    metrics=(metrics.lambada,),
    where=_LAMBADA,
  ),
  # Zero-shot, for decoder-only models: the passage as it is, and the word that goes on.
  "lambada_eval": TaskRecipe(
    "lambada:1.0.0",
    text_formats.last_word(sentinel="", before_word=" "),
    LAMBADA_FILES,
    metrics=(metrics.next_word, metrics.word_perplexity),
    where=_LAMBADA,
    add_eos=False,
  ),
}
