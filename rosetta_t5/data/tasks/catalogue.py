"""The tasks that are known by name. A task is registered when somebody asks for it, not before.

SeqIO refuses a name that is registered twice, and the package t5 registers many of ours. So ours
come only where the name is free, and give way when t5 is imported after them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rosetta_t5.data.local_files.dataset_folders import (
  data_folders,
  find_local,
  find_tfds,
  missing_text,
)
from rosetta_t5.data.objectives.text_objectives import preprocessors
from rosetta_t5.data.reading import BadExamples, BlockReader
from rosetta_t5.data.reading.file_source import make_file_source
from rosetta_t5.data.tasks.file_task import T5_VOCABULARY
from rosetta_t5.data.tasks.known import glue, pretraining, supervised
from rosetta_t5.data.tasks.task_recipe import LocalFiles, TaskRecipe
from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_seqio

if TYPE_CHECKING:
  import seqio

TASKS: Mapping[str, TaskRecipe] = {**pretraining.TASKS, **glue.TASKS, **supervised.TASKS}
# What NVIDIA's module seqio_tasks registers.
PILE_AND_GLUE = tuple(n for n in TASKS if n.startswith("the_pile") or n.endswith("_v2"))


def register(name: str) -> bool:
  """Registers the task of this name, if it is known and nobody has; says whether it is there."""
  seqio = import_seqio()
  if name in seqio.TaskRegistry.names():
    return True
  if name not in TASKS:
    return False
  _give_way(seqio.TaskRegistry)
  task = _make_task(name, name, seqio.SentencePieceVocabulary(T5_VOCABULARY))
  seqio.TaskRegistry.add_provider(name, task)
  _OURS[name] = task
  return True


def known_task(name: str, vocabulary: seqio.Vocabulary) -> str:
  """Registers a known task under a name of its own, with another vocabulary; returns that name.

  For gin: `MIXTURE_OR_TASK_NAME = @data.known_task()`. Called again with the same arguments it
  returns the same task.

  Args:
    name: the known task's, such as "the_pile_lm".
    vocabulary: of inputs and targets. In a gin file: %VOCABULARY.

  Raises:
    ValueError: there is no known task of this name.
  """
  seqio = import_seqio()
  if name not in TASKS:
    near = difflib.get_close_matches(name, TASKS, n=1)
    raise ValueError(
      f"data.known_task.name = {name!r} is no known task"
      + (f" (did you mean {near[0]!r}?)" if near else "")
      + f": known are {', '.join(sorted(TASKS))}"
    )
  for registered, of_name, of_vocabulary in _WITH_VOCABULARY:
    if of_name == name and of_vocabulary == vocabulary:
      return registered
  others = sum(of_name == name for _, of_name, _ in _WITH_VOCABULARY)
  own_name = f"{name}_own_vocabulary" + (f"_{others + 1}" if others else "")
  seqio.TaskRegistry.add_provider(own_name, _make_task(own_name, name, vocabulary))
  _WITH_VOCABULARY.append((own_name, name, vocabulary))
  return own_name


_WITH_VOCABULARY: list[tuple[str, str, Any]] = []


def _make_task(own_name: str, name: str, vocabulary: seqio.Vocabulary) -> seqio.Task:
  """Returns the known task `name`, which calls itself `own_name`."""
  seqio = import_seqio()
  recipe = TASKS[name]
  ends = recipe.add_eos
  # For a decoder alone, targets are all there is.
  inputs = {"inputs": seqio.Feature(vocabulary, add_eos=ends, required=False)}
  return seqio.Task(
    own_name,
    source=make_source(name, recipe),
    preprocessors=[recipe.text_format, *preprocessors(recipe.objective)],
    output_features={
      **({} if recipe.objective == "causal_lm" else inputs),
      "targets": seqio.Feature(vocabulary, add_eos=ends),
    },
    postprocess_fn=recipe.postprocess,
    metric_fns=list(recipe.metrics),
  )


def register_all(names: tuple[str, ...] = PILE_AND_GLUE) -> None:
  """Registers several, for code that looks into SeqIO's registry itself."""
  for name in names:
    register(name)


_OURS: dict[str, Any] = {}


def _give_way(registry: Any) -> None:
  """Lets a later registration under one of our names replace ours."""
  add = registry.add_provider
  if getattr(add, "gives_way", False):
    return

  def add_provider(name: str, provider: Any) -> None:
    ours = _OURS.pop(name, None)
    if ours is not None and registry._REGISTRY.get(name) is ours:
      registry.remove(name)
    add(name, provider)

  add_provider.gives_way = True  # type: ignore[attr-defined]
  registry.add_provider = add_provider


def make_source(name: str, recipe: TaskRecipe) -> seqio.DataSource:
  """Returns a source that looks for its data on this machine when it is first asked."""
  seqio: Any = import_seqio()

  class KnownSource(seqio.DataSource):
    """A folder of TensorFlow Datasets or the dataset's own files, whichever is there."""

    _found: Any = None

    def __init__(self) -> None:
      super().__init__(splits=recipe.splits or ())

    @property
    def found(self) -> Any:
      """The source behind this one.

      Raises:
        ValueError: the data is nowhere; the text says where it was looked for.
      """
      if self._found is None:
        self._found = _find_source(name, recipe)
      return self._found

    @property
    def splits(self) -> Any:
      return self._splits or self.found.splits

    @property
    def supports_arbitrary_sharding(self) -> bool:
      return self.found.supports_arbitrary_sharding

    def list_shards(self, split: str) -> Any:
      return self.found.list_shards(split)

    def num_input_examples(self, split: str) -> int | None:
      return self.found.num_input_examples(split)

    def get_dataset(self, split: str = "train", **options: Any) -> Any:
      return self.found.get_dataset(split=split, **options)

  return KnownSource()


def _find_source(name: str, recipe: TaskRecipe) -> Any:
  seqio = import_seqio()
  folders = data_folders(seqio.utils._TFDS_DATA_DIR_OVERRIDE)
  for folder in folders:
    if recipe.tfds and (made := find_tfds(recipe.tfds, [folder])):
      return _tfds_source(str(made))
    if recipe.files and (found := find_local(recipe.files, [folder])):
      return _local_source(recipe.files, found)
  raise ValueError(missing_text(name, recipe.tfds, recipe.files, recipe.where, folders))


def _tfds_source(folder: str) -> Any:
  """TFDS would take --tfds_data_dir for this folder, so its builder is handed over as made."""
  seqio: Any = import_seqio()

  class FolderLoader(seqio.LazyTfdsLoader):
    @property
    def data_dir(self) -> str:
      return folder

  source = seqio.TfdsDataSource(tfds_data_dir=folder)
  source._tfds_dataset = FolderLoader(None, data_dir=folder, read_only=True)
  return source


def _local_source(files: LocalFiles, found: Mapping[str, list[str]]) -> Any:
  bad_examples = BadExamples()
  reader = BlockReader(files.pick, files.layout, bad_examples=bad_examples, read=files.read)
  source = make_file_source(found, dict.fromkeys(found, reader), files.names)
  plain = source.get_dataset

  def get_dataset(split: str = "train", **options: Any) -> Any:
    return plain(split=split, **options).map(files.to_example)

  source.get_dataset = get_dataset
  return source
