"""Converts texts in memory to a task's examples, and a task's examples to texts (T5X's functions)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rosetta_t5.data.tensorflow_import import seqio, tf

Example = str | Mapping[str, str]


def default_preprocessors() -> list[Callable[..., tf.data.Dataset]]:
  """Returns SeqIO's tokenize and append_eos."""
  return [seqio.preprocessors.tokenize, seqio.preprocessors.append_eos]


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
  pairs = [_input_and_target(example) for example in examples]
  dataset = tf.data.Dataset.from_tensor_slices(
    {
      "inputs": tf.constant([text for text, _ in pairs], tf.string),
      "targets": tf.constant([target for _, target in pairs], tf.string),
      "answers": tf.constant([[target] for _, target in pairs], tf.string),
    }
  )
  options = {"sequence_length": task_feature_lengths, "output_features": features}
  for preprocess in preprocessors:
    accepted = inspect.signature(preprocess).parameters
    dataset = preprocess(dataset, **{name: x for name, x in options.items() if name in accepted})
  _check_features(dataset, features)
  dataset = seqio.utils.trim_dataset(dataset, task_feature_lengths, features)
  return dataset.prefetch(tf.data.AUTOTUNE)


def _input_and_target(example: Example) -> tuple[str, str]:
  if isinstance(example, str | bytes):
    return example, ""
  if not isinstance(example, Mapping) or not {"input", "target"} <= set(example):
    shown = f"the keys {sorted(example)}" if isinstance(example, Mapping) else repr(example)[:80]
    raise ValueError(f"an example must be a text or {{'input': text, 'target': text}}, got {shown}")
  return example["input"], example["target"]


def _check_features(dataset: tf.data.Dataset, features: Mapping[str, Any]) -> None:
  for name, feature in features.items():
    spec = dataset.element_spec.get(name)
    if spec is None:
      if feature.required:
        raise ValueError(
          f"the preprocessors must return the feature {name!r}, got {sorted(dataset.element_spec)}"
        )
      continue
    got, wanted = (spec.dtype, spec.shape.rank), (feature.dtype, feature.rank)
    if got != wanted:
      raise ValueError(
        f"the preprocessors must return the feature {name!r} as {wanted[0].name} of rank {wanted[1]}, "
        f"got {got[0].name} of rank {got[1]}. seqio.preprocessors.tokenize converts text to tokens."
      )


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
    {side: _to_python(example[f"{side}s{suffix}"]) for side in ("input", "target")}
    for example in dataset.take(batch_size * num_batches).as_numpy_iterator()
  ]
  if len(examples) < batch_size * num_batches:
    raise ValueError(
      f"{num_batches} batches of {batch_size} examples were requested, but the split '{split}' of "
      f"'{task_or_mixture_name}' has {len(examples)} examples: request fewer"
    )
  return [examples[n * batch_size : (n + 1) * batch_size] for n in range(num_batches)]


def _to_python(value: Any) -> Any:
  """Returns a text as bytes, and tokens as a list."""
  return value if isinstance(value, bytes) else value.tolist()


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

  def dataset_fn(split: str, shuffle_files: bool = False, seed: int | None = None) -> Any:
    return get_dataset_from_natural_text_examples(examples, [], {}, {})

  if add_to_registry:
    seqio.TaskRegistry.add(
      task_name,
      source=seqio.FunctionDataSource(dataset_fn, splits=["train", "validation"]),
      preprocessors=list(preprocessors),
      output_features=interactive_model.features,
      metric_fns=list(metric_fns or ()),
    )
  return seqio.get_mixture_or_task(task_name)
