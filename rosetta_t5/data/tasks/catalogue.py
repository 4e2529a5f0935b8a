"""Registers known tasks with SeqIO when their names are first used.

SeqIO refuses to register a name twice, and the package t5 registers many of the same names. A known task
is therefore registered only if its name is free, and it is removed if t5 registers that name later.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from rosetta_t5.argument_types import check_one_of
from rosetta_t5.data.local_copies import DATA_VARIABLE, T5_VOCABULARY, data_folders, find_tfds
from rosetta_t5.data.objectives import objective_preprocessors
from rosetta_t5.data.reading import BlockReader, ReadOptions, make_converter
from rosetta_t5.data.tasks.known_tasks import TASKS, TaskSpec
from rosetta_t5.data.tensorflow_import import seqio, tf, tfds_data_dir_override
from rosetta_t5.data.vocabularies.encoder_inputs import input_feature


class MissingDataError(ValueError):
  """The data of a known task is not on this machine."""


def registered_names() -> set[str]:
  """Returns the names of all tasks and mixtures in SeqIO's registries."""
  return {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}


def register(name: str) -> None:
  """Registers the known task of this name, unless the name is unknown or already registered."""
  if name in TASKS and name not in seqio.TaskRegistry.names():
    _replace_on_later_registration()
    seqio.TaskRegistry.add_provider(name, _make_task(name, name))


def known_task(name: str, vocabulary: seqio.Vocabulary) -> str:
  """Registers a known task with another vocabulary under a new name, and returns that name.

  For gin: `MIXTURE_OR_TASK_NAME = @data.known_task()`. A second call with the same arguments returns
  the same task.

  Args:
    name: the known task's name, such as "the_pile_lm".
    vocabulary: the vocabulary of inputs and targets. In a gin file: %VOCABULARY.

  Raises:
    ValueError: there is no known task of this name.
  """
  check_one_of("data.known_task.name", name, sorted(TASKS))
  registry = seqio.TaskRegistry
  for number in itertools.count(1):
    new_name = f"{name}_own_vocabulary" + (f"_{number}" if number > 1 else "")
    if new_name not in registry.names():
      registry.add_provider(new_name, _make_task(new_name, name, vocabulary))
    if registry.get(new_name).output_features["targets"].vocabulary == vocabulary:
      break
  return new_name


def text_features(vocabulary: seqio.Vocabulary | None = None, add_eos: bool = True) -> Any:
  """Returns the features of known tasks with inputs; the vocabulary is T5's by default."""
  vocabulary = vocabulary or seqio.SentencePieceVocabulary(T5_VOCABULARY)
  inputs = input_feature(vocabulary, add_eos, required=False)
  return {"inputs": inputs, "targets": seqio.Feature(vocabulary, add_eos=add_eos)}


def _make_task(new_name: str, name: str, vocabulary: seqio.Vocabulary | None = None) -> seqio.Task:
  """Returns the known task `name` as a SeqIO task called `new_name`."""
  from rosetta_t5.data.reading.file_source import CountedTask

  spec = TASKS[name]
  features = text_features(vocabulary, spec.add_eos)
  if spec.objective == "causal_lm":  # Decoder-only models have no inputs.
    del features["inputs"]
  return CountedTask(
    new_name,
    source=KnownSource(name, spec),
    preprocessors=[
      seqio.map_over_dataset(spec.text_format),
      *objective_preprocessors(spec.objective),
    ],
    output_features=features,
    postprocess_fn=spec.postprocess,
    metric_fns=list(spec.metrics),
  )


@functools.cache
def _replace_on_later_registration() -> None:
  """Wraps the registry's `add_provider`, so that a later task replaces a known task of its name."""
  registry = seqio.TaskRegistry
  add = registry.add_provider

  def add_provider(name: str, provider: Any) -> None:
    if name in registry.names() and isinstance(registry.get(name).source, KnownSource):
      registry.remove(name)
    add(name, provider)

  registry.add_provider = add_provider


class KnownSource:
  """A SeqIO data source of a known task, which searches this machine for the data when it is first used.

  What is not defined here is an attribute of the source that is found: one of TensorFlow Datasets' files, or
  one of the files as they were distributed.
  """

  # These are read when a task is made or described, before its data is needed.
  arguments, caching_permitted = None, True

  def __init__(self, name: str, spec: TaskSpec):
    self._name, self._spec = name, spec

  @functools.cached_property
  def _found(self) -> seqio.DataSource:
    """The source that reads the first copy of the data.

    Raises:
      MissingDataError: the data is not on this machine. The message lists the folders searched.
    """
    from rosetta_t5.data.reading.file_source import FileSource

    folders = data_folders(tfds_data_dir_override())
    spec, files = self._spec, self._spec.files
    for folder in folders:
      if spec.tfds and (tfds_folder := find_tfds(spec.tfds, folder)):
        source = seqio.TfdsDataSource(read_only=True)
        # SeqIO would use --tfds_data_dir, the parent folder, if it were not overridden here.
        source.tfds_dataset.override_data_dir(str(tfds_folder))
        return source
      if found := files.find(folder):
        select_texts = files.select_texts or make_converter({name: name for name in files.names})
        splits = {}
        for split, paths in found.items():
          # In the tsv files of public data sets, quotes are ordinary characters.
          options = ReadOptions(quoted=False if ".tsv" in paths[0] else None)
          splits[split] = (paths, BlockReader(select_texts, options, read_records=files.read))
        return FileSource(splits, files.names)
    patterns = ", ".join(of_split[0] for of_split in files.splits.values())
    path = spec.tfds.replace(":", "/")
    tfds = f"{path}, as TensorFlow Datasets writes it, or " if path else ""
    raise MissingDataError(
      f"The data of the task '{self._name}' is not on this machine, and data is never downloaded.\n"
      f"Searched {', '.join(map(str, folders))} for {tfds}{files.folder}/ with {patterns}.\n"
      f"Name another folder with --tfds_data_dir=DIR or the variable {DATA_VARIABLE}. "
      "docs/data.md (Known tasks) states where to get the data."
    )

  @property
  def splits(self) -> Sequence[str]:
    """The splits of the task."""
    return self._spec.splits or self._found.splits

  @property
  def reads_parts(self) -> bool:
    """Whether a split may be a part of one, like "train[:90%]"."""
    return isinstance(self._found, seqio.TfdsDataSource)

  def get_dataset(self, split: str = "train", **options: Any) -> tf.data.Dataset:
    """Returns the examples of a split as TensorFlow Datasets has them."""
    dataset = self._found.get_dataset(split=split, **options)
    return dataset if self.reads_parts else dataset.map(self._spec.files.to_example)

  def __getattr__(self, name: str) -> Any:
    if name.startswith("_"):
      raise AttributeError(name)
    return getattr(self._found, name)
