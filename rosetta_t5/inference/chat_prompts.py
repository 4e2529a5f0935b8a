"""Conversations as prompts of a model, by the chat template of its folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rosetta_t5.data.pipeline.inference_data import chat_preprocessors
from rosetta_t5.data.vocabularies.chat_template import ChatTemplate, Message
from rosetta_t5.inference.text_inference import InferenceType, TextInference
from rosetta_t5.models import DecoderOnlyModel


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
    self.preprocessors: list[Callable[..., Any]] = chat_preprocessors()

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
