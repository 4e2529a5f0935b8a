"""A model with its texts: prompts as tokens, and streams of tokens as texts."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from rosetta_t5 import decoding
from rosetta_t5.data.vocabularies.encoder_inputs import input_feature
from rosetta_t5.data.vocabularies.task_vocabularies import decode_tokens
from rosetta_t5.inference.chat_prompts import ChatPrompts
from rosetta_t5.models import EncoderDecoderModel
from rosetta_t5.serving.batches import CALLS, BatchPrograms
from rosetta_t5.serving.engine import Engine, NewToken, Request
from rosetta_t5.serving.programs import Programs
from rosetta_t5.trained_model import OpenedModel


class RequestError(ValueError):
  """A request that cannot be honoured; `field` names what is wrong in it."""

  def __init__(self, message: str, field: str | None = None):
    super().__init__(message)
    self.field = field


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How a text is generated; see `decoding.slots.SlotControls`.

  Attributes:
    temperature: 0 takes the most probable token.
    top_k: 0 for all tokens.
    top_p: 1 for all tokens.
    seed: the seed of the noise.
    min_tokens: the minimum number of tokens before the end token.
    repetition_penalty: 1 for none.
    presence_penalty: 0 for none.
    frequency_penalty: 0 for none.
    reports_probabilities: whether tokens come with log probabilities.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  seed: int = 0
  min_tokens: int = 0
  repetition_penalty: float = 1.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  reports_probabilities: bool = False


class Token(NamedTuple):
  """A token with its text and log probability, and the most probable ones."""

  id: int
  text: str
  logprob: float
  top: tuple[tuple[str, float], ...] = ()


class Piece(NamedTuple):
  """What was generated since the last piece; `finish_reason` is "stop", "length" or, before the end, None."""

  text: str
  tokens: tuple[Token, ...]
  finish_reason: str | None


class ServedModel:
  """A model that answers requests.

  Attributes:
    name: its name in requests.
    input_length: the maximum number of tokens of inputs.
    output_length: the maximum number of tokens that are generated.
    has_chat: whether it has a chat template.
    has_encoder: whether it makes vectors of texts.
  """

  def __init__(
    self,
    name: str,
    opened: OpenedModel,
    lengths: Mapping[str, int],
    num_slots: int,
    max_waiting: int,
    controls: decoding.Controls,
    calls: Collection[str] = CALLS,
  ):
    """Describes the model; `start` compiles it.

    Args:
      name: its name in requests.
      opened: the model.
      lengths: the maximum numbers of tokens of "inputs" and "targets".
      num_slots: how many requests are computed together.
      max_waiting: how many requests may wait.
      controls: those of all requests besides their own.
      calls: which of "beams", "score" and "embed" are compiled.
    """
    self.name, self._opened, self._model = name, opened, opened.model
    self._num_slots, self._max_waiting = num_slots, max_waiting
    self._controls, self._calls = controls, calls
    self.input_length, self.output_length = lengths["inputs"], lengths["targets"]
    self.has_encoder = isinstance(self._model, EncoderDecoderModel)
    self._vocabulary = self._model.output_vocabulary
    feature = input_feature(self._model.input_vocabulary, "inputs" in opened.lengths)
    self._inputs_vocabulary, self._inputs_end = feature.vocabulary, feature.add_eos
    try:
      self._chat: ChatPrompts | None = ChatPrompts(self._model)
    except (AttributeError, ValueError):
      self._chat = None
    self.has_chat = self._chat is not None
    ends = sorted(getattr(self._vocabulary, "end_ids", {self._vocabulary.eos_id or 1}))
    self._ends = tuple(self._chat.decoding["decoder_params"]["eos_id"] if self._chat else ends)

  def start(self) -> None:
    """Compiles the model and starts its thread; called in the event loop."""
    lengths = (self.input_length, self.output_length)
    self._programs = Programs(self._opened, self._num_slots, *lengths, self._ends, self._controls)
    options = (self._ends, self._controls, self._calls)
    self._batches = BatchPrograms(self._opened, self._programs, *options)
    loop = asyncio.get_running_loop()
    self._engine = Engine(self._programs, self._max_waiting, loop)

  def stop(self) -> None:
    """Cancels all requests and ends the thread."""
    self._engine.stop()

  @property
  def error(self) -> BaseException | None:
    """What ended the model's thread, if it has failed."""
    return self._engine.error

  def statistics(self) -> dict[str, float]:
    """Returns numbers about the requests; see `Engine.statistics`."""
    return self._engine.statistics()

  def encode(self, prompt: str | Sequence[int], field: str = "prompt") -> list[int]:
    """Returns the tokens of a prompt, or checks those given.

    Raises:
      RequestError: there are too many tokens, or unknown ones.
    """
    vocabulary = self._inputs_vocabulary
    if isinstance(prompt, str):
      tokens = [*getattr(vocabulary, "begin_ids", []), *vocabulary.encode(prompt)]
      tokens += [vocabulary.eos_id] * self._inputs_end
    else:
      tokens = list(prompt)
      if unknown := [token for token in tokens if not 0 <= token < vocabulary.vocab_size]:
        raise RequestError(
          f"{field} has token {unknown[0]}, but tokens are between 0 and {vocabulary.vocab_size - 1}",
          field,
        )
    return self._checked(tokens, field)

  def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns the tokens of a conversation.

    Raises:
      RequestError: there is no chat template, it refuses the messages, or there are too many tokens.
    """
    if self._chat is None:
      raise RequestError(f"model {self.name} has no chat template: use /v1/completions", "model")
    try:
      text = self._chat(messages)
    except ValueError as error:
      raise RequestError(str(error), "messages") from error
    return self._checked(list(self._inputs_vocabulary.encode(text)), "messages")

  def _checked(self, tokens: list[int], field: str) -> list[int]:
    if not tokens or len(tokens) > self.input_length:
      raise RequestError(
        f"{field} must have 1 to {self.input_length} tokens, got {len(tokens)}: give a text of another "
        "length, or start the server with a larger --input_length",
        field,
      )
    return tokens

  def _row(self, tokens: Sequence[int]) -> tuple[int, ...]:
    """Returns the tokens that the model's inputs begin with."""
    has_start = getattr(self._inputs_vocabulary, "starts_rows", True)
    return (*([] if self.has_encoder or not has_start else [self._model.pad_id]), *tokens)

  async def generate(
    self,
    tokens: Sequence[int],
    max_tokens: int,
    sampling: Sampling,
    stop: Sequence[str] = (),
  ) -> AsyncIterator[Piece]:
    """Yields the text that is generated; closing the generator frees its slot.

    Args:
      tokens: the prompt.
      max_tokens: the maximum number of tokens to generate.
      sampling: how.
      stop: the text ends before the first of these.

    Raises:
      Overloaded: too many requests are waiting.
      Stopping: the server ends.
    """
    row = self._row(tokens)
    controls = dataclasses.asdict(sampling)
    if min_tokens := controls.pop("min_tokens"):
      controls["min_end"] = min_tokens + (1 if self.has_encoder else len(row))
    request = Request(row, max_tokens, controls)
    self._engine.submit(request)
    text = StreamedText(self._vocabulary, stop)
    try:
      reason = None
      while reason is None:
        events = [await request.events.get()]
        while not request.events.empty():
          events.append(request.events.get_nowait())
        generated: list[Token] = []
        for event in events:
          if isinstance(event, BaseException):
            raise event
          is_end = event.id in self._ends
          if not is_end:
            text.tokens.append(event.id)
          generated.append(self._token(event))
          if event.is_last:
            reason = "stop" if is_end else "length"
        new, has_stopped = text.advance(is_complete=reason is not None)
        reason = "stop" if has_stopped else reason
        if new or generated:
          yield Piece(new, tuple(generated), reason)
    finally:
      request.is_cancelled = True

  def _token(self, event: NewToken) -> Token:
    top = tuple((self._text_of(token), log_prob) for token, log_prob in event.top)
    return Token(event.id, self._text_of(event.id) if top else "", event.log_prob, top)

  @functools.lru_cache(maxsize=10_000)  # noqa: B019 - models live as long as the process
  def _text_of(self, token: int) -> str:
    tokenizer: Any = getattr(self._vocabulary, "tokenizer", None)
    if hasattr(tokenizer, "id_to_piece") and token < tokenizer.get_piece_size():
      return str(tokenizer.id_to_piece(token)).replace("▁", " ")
    return str(self._vocabulary.decode([token]))

  async def beams(self, tokens: Sequence[int], count: int) -> list[tuple[str, float, int]]:
    """Returns the best texts of a beam search, the best first, at most NUM_BEAMS.

    Each has its score and its number of tokens.
    """
    decodes_NT, scores_N = await self._engine.run(self._batches.beams, self._row(tokens))
    texts = [x.decode(errors="replace") for x in decode_tokens(self._vocabulary, decodes_NT)]
    counts = (decodes_NT != self._model.pad_id).sum(axis=1).tolist()
    return list(zip(texts, map(float, scores_N), counts, strict=True))[::-1][:count]

  async def score(self, pairs: Sequence[tuple[Sequence[int], str]]) -> list[list[Token]]:
    """Returns the tokens of each target with their log probabilities.

    Args:
      pairs: the tokens of the inputs, and the target.

    Raises:
      RequestError: a target has too many tokens.
    """
    rows = []
    for inputs, target in pairs:
      targets = [*self._vocabulary.encode(target), self._vocabulary.eos_id]
      if len(targets) > self.output_length:
        raise RequestError(
          f"targets must have at most {self.output_length - 1} tokens, got {len(targets) - 1}",
          "targets",
        )
      rows.append((self._row(inputs), targets))
    scores = await asyncio.gather(*(self._engine.run(self._batches.score, row) for row in rows))
    return [
      [
        Token(token, self._text_of(token), float(score))
        for token, score in zip(row[1], row_scores, strict=True)
      ]
      for row, row_scores in zip(rows, scores, strict=True)
    ]

  async def embed(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Returns the mean of the encoder's outputs for the tokens of each prompt.

    Raises:
      RequestError: the model has no encoder.
    """
    if not self.has_encoder:
      raise RequestError(f"model {self.name} has no encoder, so it makes no embeddings", "model")
    runs = (self._engine.run(self._batches.embed, tuple(tokens)) for tokens in prompts)
    return [vector.tolist() for vector in await asyncio.gather(*runs)]


class StreamedText:
  """The text of a growing sequence of tokens, as far as later tokens cannot change it."""

  def __init__(self, vocabulary: Any, stop: Sequence[str]):
    self.tokens: list[int] = []
    self._vocabulary, self._stop, self._sent = vocabulary, stop, ""

  def advance(self, is_complete: bool) -> tuple[str, bool]:
    """Returns the new text, and whether a stop text ends it."""
    if is_complete:
      text = decode_tokens(self._vocabulary, self.tokens).decode(errors="replace")
    else:
      text = self._vocabulary.decode(self.tokens)
    places = [place for place in map(text.find, self._stop) if place >= 0]
    if places:
      text = text[: min(places)]
    elif not is_complete:
      # A character of several bytes may be incomplete, and a stop text may have begun.
      text = text.rstrip("\ufffd")
      text = text[: max(0, len(text) - max(map(len, self._stop), default=1) + 1)]
    new = text[len(self._sent) :] if text.startswith(self._sent) else ""
    self._sent += new
    return new, bool(places)
