"""Predictions and scores for any number of texts in memory."""

from __future__ import annotations

import enum
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from rosetta_t5.data.pipeline.datasets import iterate_chunks
from rosetta_t5.data.pipeline.host_batches import token_limit
from rosetta_t5.data.pipeline.text_examples import Example, get_dataset_from_natural_text_examples
from rosetta_t5.data.tensorflow_import import import_seqio
from rosetta_t5.data.vocabularies.lost_text import count_unknown
from rosetta_t5.data.vocabularies.task_vocabularies import decode_tokens
from rosetta_t5.inference.expert_capacity import inference_step
from rosetta_t5.inference.infer_fn import InferFn, get_infer_fn, join_aux
from rosetta_t5.inference.length_buckets import default_buckets
from rosetta_t5.models import DecoderOnlyModel
from rosetta_t5.parallel import BasePartitioner

Preprocessors = Sequence[Callable[..., Any]]
Inferences = tuple[list[tuple[Mapping[str, Any], Any]], dict[str, Any]]


class InferenceType(enum.Enum):
  """The kind of inference."""

  PREDICT_WITH_AUX = 1
  SCORE = 2


class TextInference:
  """Converts texts to a model's batches, runs the model, and converts its outputs to texts.

  Attributes:
    features: the `seqio.Feature` of inputs and targets.
  """

  def __init__(
    self,
    model: Any,
    partitioner: BasePartitioner,
    train_state_axes: Any,
    batch_size: int,
    task_feature_lengths: Mapping[str, int],
    add_eos: bool = True,
    inputs_end: bool = True,
  ):
    """Prepares inference; nothing is compiled before the first call.

    Args:
      model: the model.
      partitioner: splits batches over the devices.
      train_state_axes: the train state with PartitionSpecs in place of arrays.
      batch_size: number of examples in a batch.
      task_feature_lengths: lengths of inputs and targets.
      add_eos: whether inputs and targets end with the end token.
      inputs_end: False for inputs without an end token, which a language model continues.
    """
    feature = import_seqio().Feature
    self.features = {
      "inputs": feature(vocabulary=model.input_vocabulary, add_eos=add_eos and inputs_end),
      "targets": feature(vocabulary=model.output_vocabulary, add_eos=add_eos),
    }
    self._model, self._partitioner, self._axes = model, partitioner, train_state_axes
    self._batch_size, self._lengths = batch_size, task_feature_lengths
    self._converter = model.FEATURE_CONVERTER_CLS(pack=False)
    self._infer_fns: dict[Any, InferFn] = {}
    # A row of a decoder-only model contains inputs and targets.
    names = task_feature_lengths if isinstance(model, DecoderOnlyModel) else ("inputs",)
    self._row_length = sum(task_feature_lengths.get(name, 0) for name in names)

  def datasets(self, examples: Sequence[Example], preprocessors: Preprocessors) -> tuple[Any, Any]:
    """Returns the examples twice: as a dataset with the task's features, and with the model's."""
    dataset = get_dataset_from_natural_text_examples(
      examples, preprocessors, self._lengths, self.features
    )
    return dataset, self._converter(dataset, task_feature_lengths=self._lengths)

  def count_truncated(self, examples: Sequence[Mapping[str, str]]) -> Counter[str]:
    """Returns how many inputs and targets have more tokens than fit, end token included.

    Args:
      examples: {"input": text, "target": text}.
    """
    return Counter(
      name
      for name, feature in self.features.items()
      for example in examples
      if len(feature.vocabulary.encode(example[name[:-1]])) + feature.add_eos > self._lengths[name]
    )

  def count_unknown(self, examples: Sequence[Mapping[str, str]]) -> Counter[str]:
    """Returns how often each character without a piece is in the inputs; see `count_truncated`."""
    vocabulary = self.features["inputs"].vocabulary
    return sum((count_unknown(example["input"], vocabulary) for example in examples), Counter())

  def infer(
    self,
    mode: InferenceType,
    examples: Sequence[Example],
    preprocessors: Preprocessors,
    train_state: Any,
    **inference_kwargs: Any,
  ) -> Inferences:
    """Predicts or scores examples.

    Args:
      mode: PREDICT_WITH_AUX for predictions and their scores, SCORE for scores of the targets.
      examples: texts, or {"input": text, "target": text}.
      preprocessors: convert texts to features.
      train_state: contains the parameters.
      **inference_kwargs: further arguments of the model's `predict_batch_with_aux` or `score_batch`,
        such as num_decodes=4.

    Returns:
      ([(example's features, prediction as bytes or score)], {name: auxiliary values}).

    Raises:
      ValueError: `mode` is not an InferenceType.
    """
    infer_fn = self._infer_fn(mode, inference_kwargs)
    vocabulary = self.features["targets"].vocabulary
    inferences: list[tuple[Mapping[str, Any], Any]] = []
    all_aux: dict[str, Any] = {}
    datasets = self.datasets(examples, preprocessors)
    for number, task_ds, model_ds in iterate_chunks(*datasets, self._batch_size):
      rng = jax.random.fold_in(jax.random.PRNGKey(0), number)
      result = infer_fn(model_ds.enumerate(), train_state, rng)
      pairs, aux = result if isinstance(result, tuple) else (result, {})
      outputs = [output for _, output in pairs]
      if mode is InferenceType.PREDICT_WITH_AUX:
        outputs = [decode_tokens(vocabulary, tokens) for tokens in outputs]
      inferences += zip(task_ds.as_numpy_iterator(), outputs, strict=True)
      all_aux = join_aux(all_aux, aux) if all_aux else aux
    return inferences, all_aux

  def _infer_fn(self, mode: InferenceType, arguments: Mapping[str, Any]) -> InferFn:
    if not isinstance(mode, InferenceType):
      raise ValueError(f"mode must be {' or '.join(map(str, InferenceType))}, got {mode!r}")
    key = (mode, repr(sorted(arguments.items())))
    if key not in self._infer_fns:
      is_scoring = mode is InferenceType.SCORE
      method = "score_batch" if is_scoring else "predict_batch_with_aux"
      step = inference_step(self._model, method)
      self._infer_fns[key] = get_infer_fn(
        functools.partial(step, **arguments),
        self._batch_size,
        self._axes,
        self._partitioner,
        # An expert has fewer slots for shorter rows.
        input_length_buckets=() if self._model.has_experts else default_buckets(self._row_length),
        is_scoring=is_scoring,
        limit=token_limit(self._model),
      )
    return self._infer_fns[key]
