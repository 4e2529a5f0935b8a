"""A model with its texts: prompts as tokens, and streams of tokens as texts."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import functools
import inspect
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rosetta_t5 import decoding
from rosetta_t5.data.vocabularies.encoder_inputs import input_feature
from rosetta_t5.data.vocabularies.task_vocabularies import decode_tokens
from rosetta_t5.decoding.slots import SlotControls, StepOutput
from rosetta_t5.inference.text_inference import ChatPrompts
from rosetta_t5.models import EncoderDecoderModel
from rosetta_t5.models.base_model import set_decode_fn
from rosetta_t5.serving.engine import Engine, RequestError
from rosetta_t5.serving.programs import CALLS, Programs, Request
from rosetta_t5.trained_model import OpenedModel

Prompts = Sequence[Sequence[int]]  # The tokens of each.


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
    engine: what answers, after `start`.
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
    """Describes the model; `compile` and then `start` make it answer.

    Args:
      name: its name in requests.
      opened: the model.
      lengths: the maximum numbers of tokens of "inputs" and "targets".
      num_slots: how many requests are computed together.
      max_waiting: how many requests may wait.
      controls: those of all requests besides their own.
      calls: which of `CALLS` are compiled.
    """
    self.name, self._max_waiting, self._model = name, max_waiting, opened.model
    self.input_length, self.output_length = lengths["inputs"], lengths["targets"]
    self.has_encoder = isinstance(self._model, EncoderDecoderModel)
    self._vocabulary = self._model.output_vocabulary
    self._feature = input_feature(self._model.input_vocabulary, "inputs" in opened.lengths)
    self._chat: ChatPrompts | None = None
    with contextlib.suppress(AttributeError, ValueError):
      self._chat = ChatPrompts(self._model)
    self.has_chat = self._chat is not None
    ends = sorted(getattr(self._vocabulary, "end_ids", {self._vocabulary.eos_id or 1}))
    self._ends = tuple(self._chat.decoding["decoder_params"]["eos_id"] if self._chat else ends)
    changed = dataclasses.replace(opened, model=_with_beam_search(self._model, controls))
    limits = (num_slots, self.input_length, self.output_length, self._ends)
    self._make_programs = functools.partial(Programs, changed, *limits, controls, calls)

  def compile(self) -> None:
    """Compiles all programs."""
    self._programs = self._make_programs()

  def start(self) -> None:
    """Begins to answer; called in the event loop."""
    self.engine = Engine(self._programs, self._max_waiting)

  def encode(self, prompt: str | Sequence[int], field: str = "prompt") -> list[int]:
    """Returns the tokens of a text, or of a prompt of the tokenizer's own ids, such as Transformers'.

    Raises:
      RequestError: there are too many tokens, unknown ones, or one of a decoder's is padding.
    """
    vocabulary = self._feature.vocabulary
    if isinstance(prompt, str):
      tokens = [*getattr(vocabulary, "begin_ids", []), *vocabulary.encode(prompt)]
      return self._checked([*tokens, *[vocabulary.eos_id] * self._feature.add_eos], field)
    shift = getattr(vocabulary, "shift", 0)
    largest = vocabulary.vocab_size - 1 - shift
    if wrong := [token for token in prompt if not 0 <= token <= largest]:
      text = f"{field} has token {wrong[0]}, but tokens are from 0 to {largest}"
      raise RequestError(text, field)
    tokens = [token + shift for token in prompt]
    # The network begins a decoder's rows with the begin token, which a tokenizer may have put there too.
    starts_rows = not self.has_encoder and getattr(vocabulary, "starts_rows", False)
    if starts_rows and tokens[:1] == [vocabulary.bos_id]:
      tokens = tokens[1:]
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
    return self._checked(list(self._feature.vocabulary.encode(text)), "messages")

  def encode_target(self, text: str, field: str = "targets", must_end: bool = True) -> list[int]:
    """Returns the tokens of a target, with the end token if it must end.

    Raises:
      RequestError: there are too many.
    """
    tokens, most = [*self._vocabulary.encode(text)], self.output_length - int(must_end)
    if len(tokens) > most:
      raise RequestError(f"{field} must have at most {most} tokens, got {len(tokens)}", field)
    return [*tokens, *[self._vocabulary.eos_id] * must_end]

  def _checked(self, tokens: list[int], field: str) -> list[int]:
    if not tokens or len(tokens) > self.input_length:
      text = f"{field} must have 1 to {self.input_length} tokens, got {len(tokens)}"
      advice = "give a text of another length, or start the server with a larger --input_length"
      raise RequestError(f"{text}: {advice}", field)
    if not self.has_encoder and self._model.pad_id in tokens:
      text = f"{field} has the token of padding, {self._model.pad_id}: leave it out"
      raise RequestError(text, field)
    return tokens

  def _inputs(self, tokens: Sequence[int]) -> tuple[int, ...]:
    """Returns the tokens that the model's inputs begin with."""
    has_start = getattr(self._feature.vocabulary, "starts_rows", True)
    return (*([] if self.has_encoder or not has_start else [self._model.start_id]), *tokens)

  async def generate(
    self,
    texts: Sequence[tuple[Sequence[int], SlotControls]],
    max_tokens: int,
    stop: Sequence[str] = (),
    is_stream: bool = True,
  ) -> AsyncGenerator[tuple[int, Piece], None]:
    """Yields the pieces of texts as they are generated, each with the index of its text.

    Closing the generator frees the slots.

    Args:
      texts: the tokens of each prompt, and how its text is generated.
      max_tokens: the maximum number of tokens to generate.
      stop: a text ends before the first of these.
      is_stream: whether there is a piece for each token; otherwise, there is one for each text.

    Raises:
      RequestError: too many requests are waiting, or the server ends.
    """
    results: asyncio.Queue[Any] = asyncio.Queue()
    streams = [StreamedText(self._vocabulary, stop) for _ in texts]
    new: list[list[Token]] = [[] for _ in texts]
    running = {
      index: Request(self._inputs(tokens), max_tokens, controls, results=results, index=index)
      for index, (tokens, controls) in enumerate(texts)
    }
    self.engine.submit([*running.values()])
    try:
      while running:
        if isinstance(found := await results.get(), BaseException):
          raise found
        index, output = found
        if index not in running:  # A stop text has ended it.
          continue
        is_end, is_last = int(output.token) in self._ends, bool(output.has_ended)
        streams[index].tokens += [int(output.token)] * (not is_end)
        new[index].append(self._token(output, texts[index][1]))
        text, reason = "", None
        if is_stream or stop or is_last:  # `advance` decodes all tokens again.
          text, has_stopped = streams[index].advance(is_last)
          if is_last or has_stopped:
            reason = "stop" if is_end or has_stopped else "length"
            running.pop(index).is_done = True
        if is_stream or reason:
          yield index, Piece(text if is_stream else streams[index].sent, (*new[index],), reason)
          new[index].clear()
    finally:
      self.engine.cancel(running.values())

  def _token(self, output: StepOutput, controls: SlotControls) -> Token:
    token = int(output.token)
    if not controls.reports_probabilities:
      return Token(token, "", 0.0)
    pairs = zip(output.top_tokens.tolist(), output.top_log_probs.tolist(), strict=True)
    top = tuple((self._text_of(each), log_prob) for each, log_prob in pairs)
    return Token(token, self._text_of(token), float(output.log_prob), top)

  @functools.lru_cache(maxsize=10_000)  # noqa: B019 - models live as long as the process
  def _text_of(self, token: int) -> str:
    tokenizer: Any = getattr(self._vocabulary, "tokenizer", None)
    if hasattr(tokenizer, "id_to_piece") and token < tokenizer.get_piece_size():
      return str(tokenizer.id_to_piece(token)).replace("▁", " ")
    return str(self._vocabulary.decode([token]))

  async def beams(self, prompts: Prompts, count: int) -> list[tuple[Piece, float]]:
    """Returns each prompt's best texts of beam search with their scores, the best first, at most NUM_BEAMS."""
    best: list[tuple[Piece, float]] = []
    rows = [(self._inputs(tokens), ()) for tokens in prompts]
    for decodes_NT, scores_N in await self.engine.call("beams", rows):
      texts = [x.decode(errors="replace") for x in decode_tokens(self._vocabulary, decodes_NT)]
      pieces = []
      for text, decode in zip(texts, decodes_NT.tolist(), strict=True):
        found = tuple(Token(token, "", 0.0) for token in decode if token != self._model.pad_id)
        has_ended = len(found) < self.output_length or found[-1].id in self._ends
        pieces.append(Piece(text, found, "stop" if has_ended else "length"))
      best += list(zip(pieces, map(float, scores_N), strict=True))[::-1][:count]
    return best

  async def score(self, prompts: Prompts, targets: Prompts) -> list[list[Token]]:
    """Returns the tokens of targets with their log probabilities, given the tokens of the inputs."""
    rows = [(self._inputs(tokens), target) for tokens, target in zip(prompts, targets, strict=True)]
    scored: list[list[Token]] = []
    for (inputs, target), scores_T in zip(rows, await self.engine.call("score", rows), strict=True):
      found = scores_T[0 if self.has_encoder else len(inputs) - 1 :][: len(target)]
      pairs = zip(target, found.tolist(), strict=True)
      scored.append([Token(token, self._text_of(token), score) for token, score in pairs])
    return scored

  async def attention(
    self, tokens: Sequence[int], target: Sequence[int]
  ) -> tuple[np.ndarray, list[str], list[str]]:
    """Returns what the tokens of a target attend to.

    Args:
      tokens: those of the inputs.
      target: those of the target.

    Returns:
      The weights of each layer, [L, T, S], the means over its heads; and the texts of the target's
      tokens and of the inputs'.
    """
    (weights_LTS,) = await self.engine.call("attention", [(tokens, target)])
    texts = [[self._text_of(token) for token in row] for row in (target, tokens)]
    return weights_LTS[:, : len(target), : len(tokens)], texts[0], texts[1]

  async def embed(self, prompts: Prompts) -> list[list[float]]:
    """Returns the mean of the encoder's outputs for the tokens of each prompt."""
    vectors = await self.engine.call("embed", [(tokens, ()) for tokens in prompts])
    return [vector.tolist() for vector in vectors]


def _with_beam_search(model: Any, controls: decoding.Controls) -> Any:
  """Returns a copy of a model that decodes by beam search, with the arguments of its own if it does already."""
  changed = copy.copy(model)
  decode_fn = getattr(model.decode_fn, "func", model.decode_fn)  # of a partial
  searches = inspect.unwrap(decode_fn) is inspect.unwrap(decoding.beam_search)
  options = {name: x for name, x in controls._asdict().items() if name != "pad_id"}
  set_decode_fn(changed, model.decode_fn if searches else decoding.beam_search, **options)
  return changed


class StreamedText:
  """The text of a growing sequence of tokens, as far as later tokens cannot change it."""

  def __init__(self, vocabulary: Any, stop: Sequence[str]):
    self.tokens: list[int] = []
    self._vocabulary, self._stop, self.sent = vocabulary, stop, ""

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
    new = text[len(self.sent) :] if text.startswith(self.sent) else ""
    self.sent += new
    return new, bool(places)
