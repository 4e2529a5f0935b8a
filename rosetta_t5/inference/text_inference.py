"""Predictions and scores for any number of texts in memory, conversations, and sentences with blanks to fill."""

import enum
import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rosetta_t5.data.pipeline import inference_data
from rosetta_t5.data.pipeline.datasets import token_limit
from rosetta_t5.data.pipeline.inference_data import Example, Preprocessors
from rosetta_t5.data.pipeline.model_features import TaskFeatureConverter
from rosetta_t5.data.tensorflow_import import import_seqio
from rosetta_t5.data.vocabularies.chat_template import ChatTemplate, Message
from rosetta_t5.data.vocabularies.encoder_inputs import input_feature
from rosetta_t5.data.vocabularies.sentencepiece_models import sentinel_ids
from rosetta_t5.data.vocabularies.task_vocabularies import decode_tokens
from rosetta_t5.inference.infer_fn import default_buckets, get_infer_fn, inference_step
from rosetta_t5.models import DecoderOnlyModel
from rosetta_t5.parallel import BasePartitioner

Inferences = tuple[list[tuple[Mapping[str, Any], Any]], dict[str, Any]]


class InferenceType(enum.Enum):
  """The kind of inference: the method of the model."""

  PREDICT_WITH_AUX = "predict_batch_with_aux"
  SCORE = "score_batch"
  EMBED = "embed_batch"


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
      "inputs": input_feature(model.input_vocabulary, add_eos and inputs_end),
      "targets": feature(vocabulary=model.output_vocabulary, add_eos=add_eos),
    }
    self._model, self._partitioner, self._axes = model, partitioner, train_state_axes
    self._batch_size, self._lengths = batch_size, task_feature_lengths
    converter = model.FEATURE_CONVERTER_CLS(pack=False)
    self._converter = TaskFeatureConverter(converter, self.features)
    self._infer_fns: dict[Any, Callable[..., Any]] = {}
    # A row of a decoder-only model contains inputs and targets.
    names = task_feature_lengths if isinstance(model, DecoderOnlyModel) else ("inputs",)
    self._row_length = sum(task_feature_lengths.get(name, 0) for name in names)

  def datasets(self, examples: Sequence[Example], preprocessors: Preprocessors) -> tuple[Any, Any]:
    """Returns the examples twice: as a dataset with the task's features, and with the model's."""
    dataset = inference_data.get_dataset_from_natural_text_examples(
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

  def infer(
    self,
    mode: InferenceType,
    examples: Sequence[Example],
    preprocessors: Preprocessors,
    train_state: Any,
    seed: int = 0,
    **inference_kwargs: Any,
  ) -> Inferences:
    """Predicts or scores examples.

    Args:
      mode: PREDICT_WITH_AUX for predictions and their scores, SCORE for scores of the targets, EMBED
        for vectors of the inputs.
      examples: texts, or {"input": text, "target": text}.
      preprocessors: convert texts to features.
      train_state: contains the parameters.
      seed: the seed of random samples; calls with the same seed draw the same ones.
      **inference_kwargs: further arguments of the model's `predict_batch_with_aux`, `score_batch` or
        `embed_batch`, such as num_decodes=4.

    Returns:
      ([(example's features, prediction as bytes, score or vector)], {name: auxiliary values}).

    Raises:
      ValueError: `mode` is not an InferenceType.
    """
    infer_fn = self._infer_fn(mode, inference_kwargs)
    task_ds, model_ds = self.datasets(examples, preprocessors)
    result = infer_fn(model_ds.enumerate(), train_state, jax.random.PRNGKey(seed))
    pairs, aux = result if isinstance(result, tuple) else (result, {})
    outputs = [output for _, output in pairs]
    if mode is InferenceType.PREDICT_WITH_AUX:
      vocabulary = self.features["targets"].vocabulary
      outputs = [decode_tokens(vocabulary, tokens) for tokens in outputs]
    return list(zip(task_ds.as_numpy_iterator(), outputs, strict=True)), aux

  def _infer_fn(self, mode: InferenceType, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    if not isinstance(mode, InferenceType):
      raise ValueError(f"mode must be {' or '.join(map(str, InferenceType))}, got {mode!r}")
    key = (mode, repr(sorted(arguments.items())))
    if key not in self._infer_fns:
      step = inference_step(self._model, mode.value)
      self._infer_fns[key] = get_infer_fn(
        functools.partial(step, **arguments),
        self._batch_size,
        self._axes,
        self._partitioner,
        # An expert has fewer slots for shorter rows.
        input_length_buckets=() if self._model.has_experts else default_buckets(self._row_length),
        is_scoring=mode is InferenceType.SCORE,
        num_token_ids=token_limit(self._model),
      )
    return self._infer_fns[key]


class ChatPrompts:
  """Renders conversations for a model, and makes predictions end with the assistant's turn.

  Attributes:
    decoding: the arguments of `predict_batch_with_aux`.
    preprocessors: those of `TextInference.infer`. They keep the end of long conversations.
  """

  def __init__(self, model: Any):
    """Reads the template.

    Raises:
      ValueError: the model's folder has none.
    """
    vocabulary = model.input_vocabulary
    self._template = ChatTemplate(vocabulary)
    # A decoder's start token takes the place of the begin token.
    has_start = isinstance(model, DecoderOnlyModel) and vocabulary.starts_rows
    self._begin = vocabulary.folder.named.get("bos_token", "") if has_start else ""
    ends = sorted({*vocabulary.end_ids, self._template.end_id()})
    self.decoding: dict[str, Any] = {"decoder_params": {"eos_id": ends}}
    self.preprocessors: list[Callable[..., Any]] = inference_data.chat_preprocessors()

  def __call__(self, messages: Sequence[Message]) -> str:
    """Returns a conversation with the beginning of the assistant's next turn.

    Raises:
      ValueError: the template refuses the conversation.
    """
    return self._template.render(messages, add_generation_prompt=True).removeprefix(self._begin)

  def answer(self, messages: Sequence[Message], texts: TextInference, state: Any) -> str:
    """Returns what a model answers.

    Raises:
      ValueError: the template refuses the conversation.
    """
    call = self.preprocessors, state
    pairs, _ = texts.infer(InferenceType.PREDICT_WITH_AUX, [self(messages)], *call, **self.decoding)
    return pairs[0][1].decode(errors="replace").strip()


BLANK = "____"
_BLANKS = re.compile(r"_{3,}")
_BEAMS = 4
_TARGETS_LENGTH = 32  # The number of tokens for all blanks together, including their sentinels.


def blank_filler(model: Any, params: Any, input_length: int) -> Callable[[str], str]:
  """Returns a function that fills the blanks of a text with a model's best predictions.

  A blank is a run of three or more underscores, and "[prediction]" takes its place. Predictions are compiled
  at the first call. The function raises ValueError if there is no blank, if there are more blanks than the
  vocabulary has sentinels, or if the text does not fit into one input.

  Args:
    model: an encoder-decoder model, trained by span corruption.
    params: its parameters.
    input_length: the length that inputs are padded to.
  """
  vocabulary = model.input_vocabulary
  sentinels = sentinel_ids(vocabulary)
  predict = jax.jit(
    functools.partial(model.predict_batch_with_aux, num_decodes=_BEAMS, return_all_decodes=False)
  )

  def fill(text: str) -> str:
    first, *others = (part.strip() for part in _BLANKS.split(text))
    if not others:
      raise ValueError(f"There is no blank to fill: write {BLANK} where words are missing")
    if len(others) > len(sentinels):
      known = f"{len(sentinels)}, the extra_ids of the model's vocabulary"
      raise ValueError(f"The number of blanks must be at most {known}, got {len(others)}")
    tokens = [*vocabulary.encode(first)]
    for sentinel, part in zip(sentinels, others, strict=False):
      tokens += [sentinel, *vocabulary.encode(part)]
    if len(tokens) >= input_length:
      known = f"{input_length} tokens, the length of the model's inputs"
      raise ValueError(f"The text must have fewer than {known}, got {len(tokens)}")
    tokens.append(vocabulary.eos_id)
    padded_S = np.pad(np.array(tokens, np.int32), (0, input_length - len(tokens)))
    batch = {
      "encoder_input_tokens": padded_S[None],
      "decoder_input_tokens": np.zeros((1, _TARGETS_LENGTH), np.int32),
    }
    decodes_BT, _ = jax.device_get(predict(params, batch))
    spans = parse_spans(model.output_vocabulary, decodes_BT[0])
    predictions = (spans.get(sentinel, "") for sentinel in sentinels)
    return _BLANKS.sub(lambda _: f"[{next(predictions)}]", text)

  return fill


def parse_spans(vocabulary: Any, target: np.ndarray) -> dict[int, str]:
  """Returns the text that follows each sentinel in a target, by the sentinel's id."""
  sentinels = {*sentinel_ids(vocabulary)}
  spans: dict[int, list[int]] = {}
  span: list[int] = []  # Tokens before the first sentinel belong to no blank and are ignored.
  for token in map(int, target):
    if token in (0, vocabulary.eos_id):
      break
    if token in sentinels:
      span = spans.setdefault(token, [])
    else:
      span.append(token)
  return {sentinel: vocabulary.decode(tokens).strip() for sentinel, tokens in spans.items()}
