"""Data for inference: one pass over tasks, evaluators, and texts in memory as a task's examples."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rosetta_t5 import terminal
from rosetta_t5.data import dataset_config
from rosetta_t5.data.dataset_config import DatasetConfig
from rosetta_t5.data.pipeline.model_features import TaskFeatureConverter
from rosetta_t5.data.tensorflow_import import replace_loggers, seqio, tf, without_autograph
from rosetta_t5.data.vocabularies.encoder_inputs import begin_inputs

Chunk = tuple[int, "tf.data.Dataset", "tf.data.Dataset"]
Example = str | Mapping[str, str]
Preprocessors = Sequence[Callable[..., Any]]


class InferenceData:
  """One unshuffled pass over one shard of a task or mixture, without packing.

  Attributes:
    tasks: the task, or the mixture's tasks that have the split.
  """

  def __init__(self, cfg: DatasetConfig, converter_cls: Any, shard_id: int, num_shards: int):
    """Checks the arguments; reads no data.

    Args:
      cfg: the task or mixture, its split and its feature lengths.
      converter_cls: the model's feature converter, called with `pack=False`.
      shard_id: the shard of the data to read.
      num_shards: the number of shards; each example is in exactly one.

    Raises:
      ValueError: the task, its split, its cache or the shard does not exist, or the lengths do not
        fit the model.
    """
    if not 0 <= shard_id < num_shards:
      raise ValueError(
        f"infer.shard_id must be between 0 and {num_shards - 1} (infer.num_shards = {num_shards}), "
        f"got {shard_id}. The flag --shard_id also sets it."
      )
    self._converter = converter_cls(pack=False)
    provider = dataset_config.find_checked_task(cfg, self._converter)
    self._cfg = cfg
    self._shard = seqio.ShardInfo(index=shard_id, num_shards=num_shards)
    self.tasks = dataset_config.subtasks_with_split(cfg, provider)
    if not self.tasks:
      raise ValueError(
        f"'{cfg.name}' has no examples to predict one by one (prepared data are rows of tokens): give texts, "
        "such as infer --input FILE"
      )

  def _datasets(self, task: Any) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Returns the examples with the task's features, and with the model's features."""
    cfg = self._cfg
    examples = dataset_config.read_task(cfg, task, seed=cfg.seed, shard_info=self._shard)
    converter = TaskFeatureConverter(self._converter, task.output_features)
    return examples, converter(examples, task_feature_lengths=cfg.task_feature_lengths)

  def element_spec(self) -> dict[str, tf.TensorSpec]:
    """Returns shape and dtype of each of the model's features, without a batch dimension."""
    return self._datasets(self.tasks[0])[1].element_spec

  def chunks(self, task: Any, size: int, first: int = 0) -> Iterator[Chunk]:
    """Yields (number, examples with the task's features, the same with the model's) of each chunk of a task.

    Chunks before the first are read and skipped. A restart therefore sees the same chunks even if the
    input pipeline cannot save its position.

    Args:
      task: one of `tasks`.
      size: examples per chunk.
      first: the number of the first chunk to yield.

    Raises:
      ValueError: a file of the task is damaged.
    """
    with dataset_config.data_errors_named(self._cfg):
      both = tf.data.Dataset.zip(self._datasets(task)).skip(first * size)
      for number, chunk in enumerate(both.padded_batch(size).prefetch(1), first):
        pairs = tf.data.Dataset.from_tensor_slices(chunk)
        yield number, pairs.map(lambda task, _: task), pairs.map(lambda _, model: model)


def has_metrics(cfg: DatasetConfig) -> bool:
  """Returns whether the task, or a task of the mixture, has the split and metrics of predictions.

  Raises:
    ValueError: the task does not exist.
  """
  tasks = dataset_config.subtasks_with_split(cfg, dataset_config.find_task_or_mixture(cfg))
  return any(task.metric_objs for task in tasks)


def make_evaluator(
  cfg: DatasetConfig,
  feature_converter_cls: Callable[..., Any],
  evaluator_cls: Callable[..., Any] | None = None,
  log_dir: str | os.PathLike[str] | None = None,
) -> seqio.Evaluator:
  """Returns an evaluator over all examples of a split, which it reads once to find their lengths.

  Args:
    cfg: the dataset. With `task_feature_lengths` None, the longest example sets the lengths, so that
      nothing is truncated. With `use_memory_cache` False, each evaluation reads the data again.
    feature_converter_cls: called with `pack=False`.
    evaluator_cls: `seqio.Evaluator`, possibly with bound arguments; None means one that writes
      TensorBoard files and JSON.
    log_dir: the folder for its loggers; None means no loggers.

  Returns:
    The evaluator. Its `eval_tasks` are the tasks that have the split and metrics.

  Raises:
    ValueError: the task, its split or its cache does not exist, or `cfg.pack` is set.
  """
  if cfg.pack:
    raise ValueError(
      "infer_eval/utils.DatasetConfig.pack must be False, because each prediction belongs to one "
      f"example; got True for the task '{cfg.name}'"
    )
  provider = dataset_config.find_checked_task(cfg)
  if evaluator_cls is None:
    loggers = [seqio.PyLoggingLogger, seqio.TensorBoardLogger, seqio.JSONLogger]
    evaluator_cls = functools.partial(seqio.Evaluator, logger_cls=loggers)
  log_options = {"logger_cls": ()} if log_dir is None else {"log_dir": os.fspath(log_dir)}
  with dataset_config.data_errors_named(cfg):
    evaluator = without_autograph(evaluator_cls, evaluator_cls, feature_converter_cls, provider)(
      mixture_or_task_name=cfg.name,
      feature_converter=TaskFeatureConverter(
        feature_converter_cls(pack=False), provider.output_features
      ),
      eval_split=cfg.split,
      use_cached=cfg.use_cached,
      seed=cfg.seed,
      sequence_length=cfg.task_feature_lengths,
      use_memory_cache=cfg.use_memory_cache,
      **log_options,
    )
  replace_loggers(evaluator, _without_errors)
  return evaluator


def _without_errors(logger: Callable[..., None]) -> Callable[..., None]:
  """Returns a logger that logs an error instead of raising it."""

  def log(*args: Any, **kwargs: Any) -> None:
    with terminal.optional_output("the results of predictions", Exception):
      logger(*args, **kwargs)

  return log


def default_preprocessors() -> list[Callable[..., tf.data.Dataset]]:
  """Returns SeqIO's tokenize and append_eos, and what puts begin tokens before an encoder's inputs."""
  return [seqio.preprocessors.tokenize, begin_inputs, seqio.preprocessors.append_eos]


def chat_preprocessors() -> list[Callable[..., tf.data.Dataset]]:
  """Returns those of conversations that a chat template has rendered: it decides how inputs begin and end."""

  def keep_end(dataset: tf.data.Dataset, sequence_length: Mapping[str, int]) -> tf.data.Dataset:
    length = sequence_length["inputs"]
    return dataset.map(lambda example: {**example, "inputs": example["inputs"][-length:]})

  return [seqio.preprocessors.tokenize, keep_end]


def get_dataset_from_natural_text_examples(
  examples: Sequence[Example],
  preprocessors: Sequence[Callable[..., tf.data.Dataset]],
  task_feature_lengths: Mapping[str, int],
  features: Mapping[str, Any],
) -> tf.data.Dataset:
  """Returns the examples as a task would yield them (T5X's function).

  Args:
    examples: texts, or {"input": text, "target": text}.
    preprocessors: functions of a dataset, and of `sequence_length` and `output_features` if they have
      these arguments. The dataset has "inputs", "targets", and "answers", a list with the target.
    task_feature_lengths: the lengths to which features are truncated.
    features: the `seqio.Feature` of each resulting feature.

  Raises:
    ValueError: an example has another form, or a feature is missing or has the wrong type.
  """
  how = {"preprocessors": preprocessors, "output_features": features}
  task = seqio.Task("examples", _source(examples), **how)
  return without_autograph(task.get_dataset, task)(task_feature_lengths, "train", shuffle=False)


def _source(examples: Sequence[Example]) -> seqio.FunctionDataSource:
  """Returns a source whose splits "train" and "validation" both are the examples."""
  dicts = [{"input": e, "target": ""} if isinstance(e, str | bytes) else e for e in examples]
  for example in dicts:
    if not (isinstance(example, Mapping) and {"input", "target"} <= set(example)):
      raise ValueError(
        f"an example must be a text or {{'input': text, 'target': text}}, got {example!r}"[:200]
      )
  targets = [example["target"] for example in dicts]

  def read(split: str, shuffle_files: bool = False, seed: int | None = None) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(
      {
        "inputs": tf.constant([example["input"] for example in dicts], tf.string),
        "targets": tf.constant(targets, tf.string),
        "answers": tf.constant([[target] for target in targets], tf.string),
      }
    )

  return seqio.FunctionDataSource(read, splits=["train", "validation"])


def get_batches_from_seqio(
  task_or_mixture_name: str,
  split: str,
  batch_size: int,
  num_batches: int,
  get_pretokenized_examples: bool = True,
  sequence_length: Mapping[str, int] | None = None,
  **get_dataset_kwargs: Any,
) -> list[list[dict[str, Any]]]:
  """Returns batches of {"input", "target"} from a task (T5X's function).

  Args:
    task_or_mixture_name: the task or mixture.
    split: its split.
    batch_size: examples per batch.
    num_batches: the number of batches.
    get_pretokenized_examples: whether to return texts instead of lists of tokens.
    sequence_length: the lengths to which features are truncated.
    **get_dataset_kwargs: further arguments of SeqIO's `get_dataset`.

  Raises:
    ValueError: there are too few examples.
  """
  dataset = seqio.get_mixture_or_task(task_or_mixture_name)
  dataset = dataset.get_dataset(sequence_length=sequence_length, split=split, **get_dataset_kwargs)
  suffix = "_pretokenized" if get_pretokenized_examples else ""
  examples = [
    {side: np.asarray(example[f"{side}s{suffix}"]).tolist() for side in ("input", "target")}
    for example in dataset.take(batch_size * num_batches).as_numpy_iterator()
  ]
  if len(examples) < batch_size * num_batches:
    raise ValueError(f"'{task_or_mixture_name}' has only {len(examples)} examples: request fewer")
  return [examples[n * batch_size : (n + 1) * batch_size] for n in range(num_batches)]


def get_seqio_task_from_examples(
  task_name: str,
  interactive_model: Any,
  examples: Sequence[Example],
  preprocessors: Sequence[Callable[..., tf.data.Dataset]],
  metric_fns: Sequence[Callable[..., Any]] | None = None,
  add_to_registry: bool = True,
) -> seqio.Task:
  """Returns a task of these examples, for runs of train, eval and infer (T5X's function).

  Args:
    task_name: the task's name.
    interactive_model: the model whose features the task has.
    examples: see `get_dataset_from_natural_text_examples`. They are both the training and the
      validation split.
    preprocessors: convert texts to features.
    metric_fns: the task's metrics.
    add_to_registry: False returns the registered task of this name instead.
  """

  if add_to_registry:
    seqio.TaskRegistry.add(
      task_name,
      source=_source(examples),
      preprocessors=list(preprocessors),
      output_features=interactive_model.features,
      metric_fns=list(metric_fns or ()),
    )
  return seqio.get_mixture_or_task(task_name)
