"""`rosetta-t5 inspect`: shows a task's batches as text, their statistics and the problems found."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rosetta_t5.data.dataset_config import DatasetConfig, find_task_or_mixture, subtasks_with_split
from rosetta_t5.data.pipeline.data_description import first_examples
from rosetta_t5.data.pipeline.datasets import as_batch_iterator, get_dataset
from rosetta_t5.data.prepared import PreparedTask
from rosetta_t5.data.prepared.shards import read_manifest
from rosetta_t5.data.tensorflow_import import seqio
from rosetta_t5.data.vocabularies import sentencepiece_models

Example = Mapping[str, np.ndarray]  # {"inputs": tokens, "targets": tokens}

_TEXTS = 64  # number of texts that are encoded and decoded
_MODEL_FEATURES = {"inputs": "encoder_input_tokens", "targets": "decoder_target_tokens"}
_SEGMENT_IDS = {"inputs": "encoder_segment_ids", "targets": "decoder_segment_ids"}


def show_dataset(cfg: DatasetConfig, num_batches: int, num_examples: int) -> int:
  """Prints a task's data, its statistics and its problems; returns 1 if it has problems, else 0.

  Args:
    cfg: the task, its lengths and its split.
    num_batches: how many batches to read.
    num_examples: how many examples to print as text.
  """
  task = find_task_or_mixture(cfg)
  lengths = {n: x for n, x in (cfg.task_feature_lengths or {}).items() if n in task.output_features}
  cfg = dataclasses.replace(cfg, task_feature_lengths=lengths)
  vocabulary = task.output_features["targets"].vocabulary
  print(f"{cfg.name}, split '{cfg.split}' of {', '.join(task.splits)}")
  print(f"vocabulary: {vocabulary.vocab_size} ids; features: {', '.join(task.output_features)}")
  converter = seqio.EncDecFeatureConverter if "inputs" in lengths else seqio.LMFeatureConverter
  iterator = as_batch_iterator(get_dataset(cfg, 0, 1, converter))
  batches = list(itertools.islice(iterator, num_batches))
  examples = [example for batch in batches for example in _examples(batch)]
  for example in examples[:num_examples]:
    print()
    for name, tokens in example.items():
      print(f"  {name} ({len(tokens)}): {readable(tokens, vocabulary)}")
  print("\n".join(_statistics(batches, examples, vocabulary)))
  problems = [*_check_lengths(cfg), *_check_texts(cfg, task, vocabulary)]
  print("\n".join(f"problem: {problem}" for problem in problems) or "no problems found")
  return int(bool(problems))


def _examples(batch: Mapping[str, np.ndarray]) -> Iterator[Example]:
  """Yields the examples of a batch, unpacked and without padding."""
  features = {name: batch[key] for name, key in _MODEL_FEATURES.items() if key in batch}
  # Without packing, a row's only segment has the number 1, and its mask equals its segment ids.
  segments = {name: batch.get(_SEGMENT_IDS[name], x > 0) for name, x in features.items()}
  for row in range(len(features["targets"])):
    for segment in range(1, max(int(ids[row].max()) for ids in segments.values()) + 1):
      yield {name: x[row][segments[name][row] == segment] for name, x in features.items()}


def readable(tokens: Sequence[int] | np.ndarray, vocabulary: Any) -> str:
  """Returns tokens as text, with sentinels as ⟨0⟩, ⟨1⟩, … and the end token as ⟨end⟩."""
  sentinels = sentencepiece_models.sentinel_ids(vocabulary)
  markers = {id_: f"⟨{number}⟩" for number, id_ in enumerate(sentinels)}
  markers[vocabulary.eos_id] = "⟨end⟩"
  parts: list[str] = []
  for marker, run in itertools.groupby(map(int, tokens), key=markers.get):
    ids = list(run)
    parts += [vocabulary.decode(ids)] if marker is None else [marker] * len(ids)
  return " ".join(parts)


def _statistics(
  batches: Sequence[Mapping[str, np.ndarray]], examples: Sequence[Example], vocabulary: Any
) -> Iterator[str]:
  """Yields lines about the lengths of examples, how full the rows are, and the unknown tokens."""
  rows = sum(len(batch[_MODEL_FEATURES["targets"]]) for batch in batches)
  packed = f", {len(examples) / rows:.1f} packed into each" if len(examples) > rows else ""
  yield f"\n{len(examples)} examples in {rows} rows{packed}"
  for name in examples[0]:
    lengths = np.array([len(example[name]) for example in examples])
    full = lengths.sum() / (rows * batches[0][_MODEL_FEATURES[name]].shape[1])
    median = int(np.median(lengths))
    yield f"  {name:<8} {lengths.min()} to {lengths.max()} tokens, median {median}, rows {full:.1%} full"
  tokens = np.concatenate([tokens for example in examples for tokens in example.values()])
  yield f"  tokens: {np.mean(tokens == vocabulary.unk_id):.3%} unknown"


def _check_lengths(cfg: DatasetConfig) -> Iterator[str]:
  """Prints the number of examples and the share truncated; yields a problem if targets lose their end."""
  descriptions = first_examples(cfg)
  for each in descriptions:
    print(f"examples of {each.task}: {each.text(cfg)}")
    try:
      each.check_targets(cfg)
    except ValueError as error:
      yield str(error)
  if not any(each.lengths for each in descriptions):
    print("no text is truncated: texts are cut into rows and read to their end")


def _check_texts(cfg: DatasetConfig, task: Any, vocabulary: Any) -> Iterator[str]:
  """Prints what texts lose when they are encoded and decoded; yields what is too much."""
  if isinstance(task, PreparedTask):
    lost = [Counter[str](read_manifest(folder).get("losses")) for folder in task.folders]
  else:
    lost = [sentencepiece_models.count_lost(text, vocabulary) for text in _texts_of_task(cfg, task)]
  if counts := sum(lost, Counter()):
    print("\n".join(sentencepiece_models.describe_lost(counts)))
    yield from sentencepiece_models.lost_text_problems(counts)


def _texts_of_task(cfg: DatasetConfig, task: Any) -> Iterator[str]:
  """Yields the longest text of each of the first examples of the task's sources."""
  for part in subtasks_with_split(cfg, task):
    source = part.source.get_dataset(split=cfg.split, shuffle=False)
    for example in source.take(_TEXTS).as_numpy_iterator():
      fields = example.values() if isinstance(example, Mapping) else [example]
      texts = (field for field in fields if isinstance(field, bytes))
      yield max(texts, key=len, default=b"").decode()
