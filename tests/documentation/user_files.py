"""Writes the files that the pages assume a user to have: text, data sets, a vocabulary, checkpoints."""

from __future__ import annotations

import csv
import json
import pathlib
import shutil
import string
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import shell

from rosetta_t5.checkpoints.arrays.lazy_arrays import as_stored_array
from rosetta_t5.checkpoints.checkpoint_folders import read_arrays
from rosetta_t5.checkpoints.formats import t5x_layouts
from rosetta_t5.data.vocabularies.sentencepiece_models import train_sentencepiece

TEXTS = [f"Return {n * n}, which is the square of {n} and of {-n}." for n in range(300)]
_NAMES = ("Ada", "Bo", "Cy", "Di")
_TASK_MODULE = """
import seqio

feature = seqio.Feature(seqio.SentencePieceVocabulary("vocabulary.model", extra_ids=100))
seqio.TaskRegistry.add(
  "my_task",
  source=seqio.TextLineDataSource({"train": "train-0.txt", "validation": "validation.txt"}),
  preprocessors=[
    lambda lines: lines.map(lambda line: {"inputs": line, "targets": line}),
    seqio.preprocessors.tokenize,
    seqio.preprocessors.append_eos,
  ],
  output_features={"inputs": feature, "targets": feature},
)
"""
# A checkpoint in each of the places that the pages name.
_CHECKPOINTS = """
python -m t5x.train --gin_file=t5x/examples/t5/t5_1_1/small.gin --gin_file=t5x/configs/runs/pretrain.gin \
  --gin_file=own_text.gin --gin.DROPOUT_RATE=0.0 --gin.TRAIN_STEPS=2 --gin.USE_CACHED_TASKS=False \
  --gin.TASK_FEATURE_LENGTHS="{'inputs': 32, 'targets': 16}" --gin.MODEL_DIR="'runs/pretrained'" \
  --gin.train.train_eval_dataset_cfg=None --gin.train.infer_eval_dataset_cfg=None
rosetta-t5 convert runs/pretrained google/flan-t5-small --to hf --tokenizer spiece.model
rosetta-t5 convert runs/pretrained t5x_old --to t5x-legacy
cp -r google/flan-t5-small t5-v1_1-small
ln -s flan-t5-small google/flan-t5-base
ln -s flan-t5-small google/flan-t5-xl
ln -s t5-v1_1-small t5-v1_1-base
"""
_QUICKSTART = "python -m t5x.train --gin_file=gin/examples/quickstart.gin"
_OWN_TEXT = """
from __gin__ import dynamic_registration
from rosetta_t5.data.tasks import stdlib_docs
MIXTURE_OR_TASK_NAME = 'stdlib_docs_span_corruption'
VOCABULARY = @stdlib_docs.vocabulary()
"""
_MY_FINETUNING = """
include 't5x/examples/t5/t5_1_1/small.gin'
include 't5x/configs/runs/finetune.gin'
include 'own_text.gin'
TASK_FEATURE_LENGTHS = {'inputs': 32, 'targets': 16}
USE_CACHED_TASKS = False
TRAIN_STEPS = 10
"""


def write_user_files(folder: pathlib.Path) -> None:
  """Writes everything into an empty folder, which is also the working directory of the pages."""
  _write_text(folder)
  _write_data_sets(folder / "data")
  characters = [" ".join(string.ascii_letters + string.punctuation)] * 20
  vocabulary = train_sentencepiece(TEXTS + characters, 250)
  for name in ("spiece.model", "vocabulary.model", "data/spiece.model"):
    (folder / name).write_bytes(vocabulary)
  pieces = [*(chr(code) for code in range(33, 127)), "ab", "<|endoftext|>"]
  (folder / "vocab.json").write_text(json.dumps({piece: n for n, piece in enumerate(pieces)}))
  (folder / "merges.txt").write_text("#version: 0.2\na b\n")
  (folder / "docs").mkdir()
  (folder / "docs/page.md").write_text("\n\n".join(TEXTS))
  (folder / "my").mkdir()
  (folder / "my/tasks.py").write_text(_TASK_MODULE)
  (folder / "own_text.gin").write_text(_OWN_TEXT)
  (folder / "my_finetuning.gin").write_text(_MY_FINETUNING)
  (folder / "scripts_gpu").symlink_to(pathlib.Path(__file__).resolve().parents[2] / "scripts_gpu")
  shell.run_script(_CHECKPOINTS, folder, dry=False)
  _change_step(folder / "t5x_old", 1_000_000, is_legacy=True)
  _change_step(folder / "runs/pretrained", 1_000_000)
  for run in ("ft", "squad", "wmt", "t5x"):
    shutil.copytree(folder / "runs/pretrained", folder / "runs" / run)


def run_quickstart(folder: pathlib.Path) -> None:
  """Writes the quickstart's run, whose last checkpoint has a position in the data."""
  without = "--gin.train.train_eval_dataset_cfg=None --gin.train.infer_eval_dataset_cfg=None"
  shell.run_script(f"{_QUICKSTART} {without}", folder, dry=False)
  _change_step(folder / "quickstart/run", 1200)
  position = "--gin.utils.SaveCheckpointConfig.ignore_dataset_until=1200"
  shell.run_script(f"{_QUICKSTART} {position}", folder, dry=False)


def copy_user_files(source: pathlib.Path, folder: pathlib.Path) -> None:
  """Copies the files into a folder, in which a page may change them."""
  shutil.copytree(source, folder, symlinks=True, dirs_exist_ok=True)


def _change_step(folder: pathlib.Path, step: int, is_legacy: bool = False) -> None:
  """Writes a folder's checkpoint of step 2 as one of another step."""
  arrays = {
    **read_arrays(folder / "checkpoint_2"),
    "state/step": as_stored_array(np.int32(step)),
  }
  path = folder / f"checkpoint_{step}"
  if is_legacy:
    t5x_layouts.write_older(path, arrays)
  else:
    t5x_layouts.write_orbax(path, arrays)
  shutil.rmtree(folder / "checkpoint_2")


def _write_text(folder: pathlib.Path) -> None:
  pages = [" ".join(TEXTS[n : n + 20]) for n in range(280)]
  texts = {"corpus/a.txt": TEXTS, "corpus/b.txt": pages, "more/b.txt": TEXTS}
  splits = {"train-0.txt": TEXTS[:250], "validation.txt": TEXTS[250:]}
  for name, lines in {**texts, **splits}.items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(lines))
  _write_jsonl(folder / "corpus/c.jsonl.zst", ({"text": text} for text in TEXTS))
  questions = (
    {"question": f"What is {n}?", "context": text, "answer": f"{n}"}
    for n, text in enumerate(TEXTS[:40])
  )
  _write_jsonl(folder / "questions.jsonl", questions)
  rows = [{"question": f"What is the square of {n}?", "answer": f"{n * n}"} for n in range(40)]
  _write_jsonl(folder / "rows.jsonl", rows)
  _write_jsonl(folder / "new.jsonl", rows[:4])
  for name, some in (("rows.csv", rows), ("new.csv", rows[:4])):
    with (folder / name).open("w") as file:
      table = csv.DictWriter(file, rows[0])
      table.writeheader()
      table.writerows(some)


def _write_data_sets(data: pathlib.Path) -> None:
  for name in (*(f"train/{n:02}" for n in range(30)), "val", "test"):
    _write_jsonl(data / f"the_pile/{name}.jsonl.zst", ({"text": text} for text in TEXTS))
  _write_jsonl(data / "lambada/lambada_test.jsonl", ({"text": text} for text in TEXTS))
  (data / "squad").mkdir()
  for split, numbers in (("train", range(8)), ("dev", range(8, 12))):
    paragraphs = [_paragraph(name, n) for n in numbers for name in _NAMES]
    text = json.dumps({"data": [{"title": "Cats", "paragraphs": paragraphs}]})
    (data / f"squad/{split}-v1.1.json").write_text(text)
  (data / "glue/mnli").mkdir(parents=True)
  for name in ("train", "dev_matched", "dev_mismatched"):
    with (data / f"glue/mnli/{name}.tsv").open("w") as file:
      rows = csv.writer(file, delimiter="\t")
      rows.writerow(["index", "sentence1", "sentence2", "gold_label"])
      rows.writerows([n, f"{n} is odd.", f"{n} is even.", "contradiction"] for n in range(16))


def _paragraph(name: str, cats: int) -> dict[str, Any]:
  """Returns a paragraph of SQuAD with one question."""
  answers = [{"text": str(cats), "answer_start": len(f"{name} has ")}]
  question = {"id": f"{name}{cats}", "question": f"How many cats has {name}?", "answers": answers}
  return {"context": f"{name} has {cats} cats.", "qas": [question]}


def _write_jsonl(path: pathlib.Path, rows: Iterable[Mapping[str, str]]) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  text = "".join(json.dumps(row) + "\n" for row in rows).encode()
  with pa.output_stream(path, compression="zstd" if path.suffix == ".zst" else None) as file:
    file.write(text)
