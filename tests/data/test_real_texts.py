"""Our tasks and the package t5's preprocessors give equal strings for real benchmark data."""

from __future__ import annotations

import csv
import itertools
import json
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from rosetta_t5.data import task_metrics
from rosetta_t5.data.local_copies import DATA_VARIABLE as VARIABLE
from rosetta_t5.data.tasks import catalogue
from rosetta_t5.data.tensorflow_import import import_seqio, import_tensorflow

MAX_EXAMPLES = 2000


@pytest.fixture(scope="module")
def theirs(shared: pathlib.Path) -> Any:
  return pytest.importorskip("t5.data.preprocessors", reason="the package t5 is not installed")


@pytest.fixture
def folder(shared: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
  """A data folder with links to the real files under the names that the tasks search."""
  for name, source in (
    ("squad/dev-v1.1.json", "squad/dev-v1.1.json"),
    ("glue/mnli/mnli_dev_matched.tsv", "mnli/mnli_dev_matched_gold.tsv"),
  ):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).symlink_to(shared / "data" / source)
  monkeypatch.setenv(VARIABLE, str(tmp_path))
  return tmp_path


def ours(name: str, split: str) -> list[dict[str, Any]]:
  """Returns the texts that the known task makes from the files."""
  spec = catalogue.TASKS[name]
  dataset = catalogue.KnownSource(name, spec).get_dataset(split, shuffle=False)
  return list(dataset.map(spec.text_format).take(MAX_EXAMPLES).as_numpy_iterator())


def expected(function: Any, examples: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
  """Returns the texts that T5's preprocessor makes from TFDS's examples."""
  tf = import_tensorflow()
  rows = list(itertools.islice(examples, MAX_EXAMPLES))
  signature = tf.nest.map_structure(
    lambda value: tf.TensorSpec([None] if isinstance(value, np.ndarray) else [], _dtype(value)),
    rows[0],
  )
  dataset = tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=signature)
  return list(function(dataset).as_numpy_iterator())


def _dtype(value: Any) -> Any:
  tf = import_tensorflow()
  return tf.int64 if isinstance(value, int) else tf.string


def assert_same(a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]], *names: str) -> None:
  assert len(a) == len(b) > 1000
  for name in names:
    for row, other in zip(a, b, strict=True):
      np.testing.assert_array_equal(row[name], other[name])


@pytest.mark.slow
def test_squads_texts_are_t5s(theirs: Any, shared: pathlib.Path, folder: pathlib.Path) -> None:
  def questions() -> Iterator[dict[str, Any]]:
    for article in json.loads((shared / "data/squad/dev-v1.1.json").read_text())["data"]:
      for paragraph in article["paragraphs"]:
        for qa in paragraph["qas"]:
          answers = np.array([answer["text"] for answer in qa["answers"]], object)
          yield {
            "id": qa["id"],
            "question": qa["question"],
            "context": paragraph["context"],
            "answers": {"text": answers},
          }

  names = ("inputs", "targets", "id", "context", "question", "answers")
  assert_same(
    ours("squad_v010_allanswers", "validation"), expected(theirs.squad, questions()), *names
  )


@pytest.mark.slow
def test_mnlis_texts_are_t5s(theirs: Any, shared: pathlib.Path, folder: pathlib.Path) -> None:
  glue_utils = pytest.importorskip("t5.data.glue_utils")
  config = pytest.importorskip("tensorflow_datasets").text.glue.Glue.builder_configs["mnli"]
  path = shared / "data/mnli/mnli_dev_matched_gold.tsv"

  def pairs() -> Iterator[dict[str, Any]]:
    with open(path, newline="") as file:
      for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
        label = config.label_classes.index(row["gold_label"])
        texts = {"hypothesis": row["hypothesis"], "premise": row["premise"]}
        yield {**texts, "label": label, "idx": int(row["index"])}

  found = ours("glue_mnli_v2", "validation_matched")
  assert_same(
    found,
    expected(glue_utils.get_glue_text_preprocessor(config), pairs()),
    "inputs",
    "targets",
    "idx",
  )
  gold = [catalogue.TASKS["glue_mnli_v2"].postprocess(e["targets"].decode()) for e in found]
  assert {catalogue.TASKS["glue_mnli_v2"].postprocess("no label"), *gold} == {-1, 0, 1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wmt_t2t_ende_v003", "wmt15_enfr_v003", "wmt16_enro_v003"])
def test_translation_texts_are_t5s(
  theirs: Any, shared: pathlib.Path, folder: pathlib.Path, name: str
) -> None:
  """Sentences of books, with quotes, dashes and accents, serve as both languages."""
  spec = catalogue.TASKS[name]
  target = spec.files.names[1]  # type: ignore[union-attr]
  text = (shared / "data/books/Leo_Tolstoy__War_and_Peace.md").read_text()
  sentences = [s for s in re.split(r"(?<=[.!?”])\s+", text) if s.strip()][: 2 * MAX_EXAMPLES]
  pairs = [{"en": a, target: b} for a, b in zip(sentences[::2], sentences[1::2], strict=True)]
  path = folder / spec.files.folder / "train.jsonl"  # type: ignore[union-attr]
  path.parent.mkdir(parents=True)
  path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))

  def translate(dataset: Any) -> Any:
    return theirs.translate(dataset, "en", target)

  assert_same(ours(name, "train"), expected(translate, iter(pairs)), "inputs", "targets")


@pytest.mark.slow
def test_tokens_of_the_registered_task_are_t5s(
  theirs: Any, shared: pathlib.Path, folder: pathlib.Path, isolated_registries: None
) -> None:
  """`glue_mnli_v2` has T5's vocabulary, one end token, and the texts beside the tokens."""
  seqio = import_seqio()
  vocabulary = seqio.SentencePieceVocabulary(
    str(shared / "data/t5_vocab/spiece.model"), extra_ids=100
  )
  name = catalogue.known_task("glue_mnli_v2", vocabulary)
  dataset = seqio.get_mixture_or_task(name).get_dataset(
    {"inputs": 512, "targets": 16}, split="validation_matched", shuffle=False
  )
  for example in dataset.take(50).as_numpy_iterator():
    for side in ("inputs", "targets"):
      text = example[f"{side}_pretokenized"].decode()
      assert example[side].tolist() == [*vocabulary.encode(text), 1]


def distorted(random: np.random.Generator, answer: str, context: str) -> str:
  """Returns an answer as a model may predict it: correct, shorter, longer, in capitals, wrong or empty."""
  words = answer.split()
  kind = random.integers(8)
  if kind < 2:
    return answer
  other = context.split()
  start = int(random.integers(max(1, len(other) - 3)))
  return [
    answer.upper() + "!",
    " ".join(words[:-1]),
    "the " + answer + " " + other[start],
    " ".join(other[start : start + 3]),
    "",
    answer.replace(" ", "  ").replace("-", " "),
  ][kind - 2]


@pytest.mark.slow
def test_squads_scores_of_random_predictions_are_t5s(shared: pathlib.Path) -> None:
  theirs = pytest.importorskip("t5.evaluation.metrics", reason="the package t5 is not installed")
  random = np.random.default_rng(0)
  answers, predictions = [], []
  for article in json.loads((shared / "data/squad/dev-v1.1.json").read_text())["data"]:
    for paragraph in article["paragraphs"]:
      for qa in paragraph["qas"]:
        answers.append([answer["text"] for answer in qa["answers"]])
        predictions.append(distorted(random, answers[-1][0], paragraph["context"]))
  scores = task_metrics.squad(answers, predictions)
  assert scores == pytest.approx(theirs.squad(answers, predictions))
  assert 40 < scores["em"] < scores["f1"] < 80
