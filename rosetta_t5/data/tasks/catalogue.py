"""The known tasks, which are registered with SeqIO when their names are first used.

SeqIO refuses to register a name twice, and the package t5 registers many of the same names. A known task
is therefore registered only if its name is free, and it is removed if t5 registers that name later.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from rosetta_t5.argument_types import check_one_of
from rosetta_t5.data.local_files import dataset_folders
from rosetta_t5.data.local_files.local_assets import T5_VOCABULARY
from rosetta_t5.data.objectives.text_objectives import objective_preprocessors
from rosetta_t5.data.reading import BlockReader, ReadOptions, make_converter
from rosetta_t5.data.seqio_internals import tfds_data_dir_override
from rosetta_t5.data.tasks.known import glue, pretraining, supervised
from rosetta_t5.data.tasks.task_spec import TaskSpec
from rosetta_t5.data.tensorflow_import import seqio, tf

TASKS: Mapping[str, TaskSpec] = {**pretraining.TASKS, **glue.TASKS, **supervised.TASKS}

_registered_here: dict[str, seqio.Task] = {}


def registered_names() -> set[str]:
  """Returns the names of all tasks and mixtures in SeqIO's registries."""
  return {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}


def register(name: str) -> None:
  """Registers the known task of this name, unless the name is unknown or already registered."""
  registry = seqio.TaskRegistry
  if name not in TASKS or name in registry.names():
    return
  _replace_on_later_registration()
  task = _make_task(name, name, seqio.SentencePieceVocabulary(T5_VOCABULARY))
  registry.add_provider(name, task)
  _registered_here[name] = task


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
  new_name, number = f"{name}_own_vocabulary", 1
  while new_name in registry.names():
    if registry.get(new_name).output_features["targets"].vocabulary == vocabulary:
      return new_name
    number += 1
    new_name = f"{name}_own_vocabulary_{number}"
  registry.add_provider(new_name, _make_task(new_name, name, vocabulary))
  return new_name


def _make_task(new_name: str, name: str, vocabulary: seqio.Vocabulary) -> seqio.Task:
  """Returns the known task `name` as a SeqIO task called `new_name`."""
  from rosetta_t5.data.reading.file_source import CountedTask

  spec = TASKS[name]
  features = {}
  if spec.objective != "causal_lm":  # Decoder-only models have no inputs.
    features["inputs"] = seqio.Feature(vocabulary, add_eos=spec.add_eos, required=False)
  features["targets"] = seqio.Feature(vocabulary, add_eos=spec.add_eos)
  return CountedTask(
    new_name,
    source=make_source(name, spec),
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
    task = _registered_here.pop(name, None)
    if task is not None and name in registry.names() and registry.get(name) is task:
      registry.remove(name)
    add(name, provider)

  registry.add_provider = add_provider


def make_source(name: str, spec: TaskSpec) -> seqio.DataSource:
  """Returns a known task's source, which searches this machine for the data when it is first used."""

  class KnownSource(seqio.DataSource):
    """Delegates to the source that is found: TensorFlow Datasets' files, or the distributed files."""

    def __init__(self) -> None:
      super().__init__(splits=spec.splits or ())

    @functools.cached_property
    def _source(self) -> seqio.DataSource:
      return _find_source(name, spec)

    @property
    def splits(self) -> Sequence[str]:
      return self._splits or self._source.splits

    @property
    def is_movable(self) -> bool:
      return getattr(self._source, "is_movable", False)

    @property
    def reads_parts(self) -> bool:
      """Whether a split may be a part of one, like "train[:90%]"."""
      return isinstance(self._source, seqio.TfdsDataSource)

    @property
    def supports_arbitrary_sharding(self) -> bool:
      return self._source.supports_arbitrary_sharding

    def list_shards(self, split: str) -> Sequence[str]:
      return self._source.list_shards(split)

    def num_input_examples(self, split: str) -> int | None:
      return self._source.num_input_examples(split)

    def count_examples(self, split: str, **options: Any) -> tuple[int, bool]:
      return self._source.count_examples(split, **options)

    def get_dataset(self, split: str = "train", **options: Any) -> tf.data.Dataset:
      dataset = self._source.get_dataset(split=split, **options)
      return dataset if self.reads_parts else dataset.map(spec.files.to_example)

  return KnownSource()


def _find_source(name: str, spec: TaskSpec) -> seqio.DataSource:
  """Returns the source that reads the first copy of the data.

  Raises:
    ValueError: the data is not on this machine. The message lists the folders that were searched.
  """
  from rosetta_t5.data.reading.file_source import FileSource

  folders = dataset_folders.data_folders(tfds_data_dir_override())
  for folder in folders:
    if spec.tfds and (tfds_folder := dataset_folders.find_tfds(spec.tfds, folder)):
      source = seqio.TfdsDataSource(read_only=True)
      # SeqIO would use --tfds_data_dir, the parent folder, if it were not overridden here.
      source.tfds_dataset.override_data_dir(str(tfds_folder))
      return source
    files = spec.files
    if found := dataset_folders.find_distributed_files(files, folder):
      select_texts = files.select_texts or make_converter({name: name for name in files.names})
      # In the tsv files of public data sets, quotes are ordinary characters.
      options = {
        split: ReadOptions(quoted=False if ".tsv" in paths[0] else None)
        for split, paths in found.items()
      }
      readers = {
        split: BlockReader(select_texts, of_split, read=files.read)
        for split, of_split in options.items()
      }
      return FileSource(found, readers, files.names)
  raise ValueError(dataset_folders.missing_data_message(name, spec, folders))
