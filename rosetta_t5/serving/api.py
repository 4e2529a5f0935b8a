"""OpenAI's interface: the fields of requests (a few are this project's own) with their conditions, and the responses."""

import base64
import dataclasses
import itertools
import json
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rosetta_t5.argument_types import Condition, near_hint, one_of
from rosetta_t5.decoding.slots import SlotControls
from rosetta_t5.serving.engine import RequestError
from rosetta_t5.serving.programs import NUM_BEAMS
from rosetta_t5.serving.served_model import Piece, ServedModel, Token

_OF_BEAM_SEARCH = {"use_beam_search", "prompt", "messages", "n", "best_of", "user"}
_LOWEST = -9999.0  # the log probability of an impossible token; JSON has no infinity
_MOST, _INT32 = 2048, 2**31 - 1
Fields = Mapping[str, Condition]


def check(
  given: Any, known: Fields, needed: tuple[str, ...] = (), place: str = ""
) -> dict[str, Any]:
  """Returns the fields of an object that are not null.

  Args:
    given: the object.
    known: the conditions of all fields that it may have.
    needed: the names of those that it must have.
    place: precedes the names of the fields in errors, such as "messages[0].".

  Raises:
    RequestError: a field is unknown or missing, or has another value than expected.
  """
  if not isinstance(given, dict):
    field = place.rstrip(".") or "the body"
    raise RequestError(f"{field} must be a JSON object, got {_shown(given)}", field)
  for name, value in {**dict.fromkeys(needed), **given}.items():
    if name not in known:
      text = f"unknown field {place}{name}{near_hint(name, known)}: got {_shown(value)}, expected "
      raise RequestError(f"{text}only {', '.join(sorted(known))}", place + name)
    if (value is not None or name in needed) and not known[name].holds(value):
      text = f"{place}{name} must be {known[name].text}, got {_shown(value)}"
      raise RequestError(text, place + name)
  return {name: value for name, value in given.items() if value is not None}


def _shown(value: Any) -> str:
  text = json.dumps(value, ensure_ascii=False)
  return text if len(text) <= 100 else f"{text[:100]}…"


def _number(
  low: float, high: float, kinds: Any = (int, float), name: str = "a number"
) -> Condition:
  holds = lambda x: isinstance(x, kinds) and not isinstance(x, bool) and low <= x <= high  # noqa: E731
  return Condition(f"{name} from {low} to {high}", holds)


def _integer(low: int, high: int) -> Condition:
  return _number(low, high, int, "an integer")


def _is(kind: type) -> Callable[[Any], bool]:
  return lambda value: isinstance(value, kind)


def _is_list(value: Any, holds: Callable[[Any], bool], most: int = _MOST) -> bool:
  return isinstance(value, list) and 0 < len(value) <= most and all(map(holds, value))


def is_prompt(value: Any) -> bool:
  """Returns whether a value of a field is one text or the ids of one."""
  return isinstance(value, str) or _is_list(value, _integer(0, _INT32).holds, _INT32)


def _only(*values: Any) -> Condition:
  """Returns the condition of a field of OpenAI's that has no effect here."""
  text = " or ".join(["left out", *map(json.dumps, values)])
  return Condition(f"{text}, because this server does not have it", lambda x: x in values)


_TEXT, _FLAG = Condition("a text", _is(str)), Condition("true or false", _is(bool))
_TEXTS = Condition(f"a list of 1 to {_MOST} texts", lambda x: _is_list(x, _is(str)))
_PROMPTS = Condition(
  f"a text, a list of token ids, or a list of 1 to {_MOST} of these",
  lambda x: is_prompt(x) or _is_list(x, is_prompt),
)
_STOP = Condition(
  "a text, or a list of at most 4 texts, none of them empty",
  lambda x: (
    x == [] or _is_list([x] if isinstance(x, str) else x, lambda y: y and isinstance(y, str), 4)
  ),
)
_STREAM_OPTIONS = Condition(
  '{"include_usage": true}, or the same with false',
  lambda x: x in [{"include_usage": y} for y in (True, False)],
)
_KINDS = {"f": _number, "i": _integer, "u": _integer}
CONTROLS = {
  field.name: _KINDS[field.default.dtype.kind](*field.metadata["range"])  # type: ignore[union-attr]
  for field in dataclasses.fields(SlotControls)
  if "range" in field.metadata
}
_GENERATION = {
  **CONTROLS,
  "n": _integer(1, 8),
  "stop": _STOP,
  "stream_options": _STREAM_OPTIONS,
  **dict.fromkeys(("stream", "use_beam_search", "parallel_tool_calls"), _FLAG),
  **dict.fromkeys(("model", "user", "safety_identifier", "prompt_cache_key"), _TEXT),
  **dict.fromkeys(("max_tokens", "max_completion_tokens"), _integer(1, _INT32)),
  **dict.fromkeys(("logit_bias", "metadata"), _only({})),
  **dict.fromkeys(("tools", "functions"), _only([])),
  **dict.fromkeys(("tool_choice", "function_call"), _only("none", "auto")),
  **dict.fromkeys(("audio", "prediction", "reasoning_effort", "service_tier"), _only()),
  **dict.fromkeys(("echo", "store"), _only(False)),
  "suffix": _only(""),
  "modalities": _only(["text"]),
  "response_format": _only({"type": "text"}),
}
COMPLETION = {**_GENERATION, "prompt": _PROMPTS, "logprobs": _integer(0, 5), "best_of": _only(1)}
_MESSAGES = Condition(f"a list of 1 to {_MOST} messages", lambda x: _is_list(x, _is(dict)))
CHAT = {**_GENERATION, "messages": _MESSAGES, "logprobs": _FLAG, "top_logprobs": _integer(0, 5)}
_CONTENT = Condition(
  "a text or a list of parts", lambda x: isinstance(x, str) or _is_list(x, _is(dict))
)
_ROLE = one_of(("system", "developer", "user", "assistant"))
MESSAGE = {"role": _ROLE, "content": _CONTENT, "refusal": _only(), "tool_calls": _only([])}
PART = {"type": one_of(("text",)), "text": _TEXT}
_FORMAT = one_of(("float", "base64"))
EMBEDDING = {"input": _PROMPTS, "encoding_format": _FORMAT, "model": _TEXT, "user": _TEXT}
SCORE = {"inputs": _TEXTS, "targets": _TEXTS, "model": _TEXT}
_ONE_PROMPT = Condition("a text or a list of token ids", is_prompt)
_OF_ATTENTION = {"prompt": _ONE_PROMPT, "messages": _MESSAGES, "target": _TEXT}
ATTENTION = {**_OF_ATTENTION, "layer": _integer(-1000, 1000), "model": _TEXT}


def encode_all(prompts: Any, model: ServedModel, field: str) -> list[list[int]]:
  """Returns the tokens of the prompts of a field, or of the only one."""
  given = [prompts] if is_prompt(prompts) else prompts
  return [model.encode(prompt, field) for prompt in given]


def encode_prompts(given: Mapping[str, Any], model: ServedModel) -> list[list[int]]:
  """Returns the tokens of `prompt`, or of `messages`, which are checked."""
  if "messages" not in given:
    return encode_all(given["prompt"], model, "prompt")
  messages = []
  for index, each in enumerate(given["messages"]):
    place, whole = f"messages[{index}]", (*PART,)
    message = check(each, MESSAGE, ("role", "content"), f"{place}.")
    role, content = message["role"], message["content"]
    if not isinstance(content, str):
      pairs = ((x, f"{place}.content[{n}].") for n, x in enumerate(content))
      content = "".join(check(x, PART, whole, y)["text"] for x, y in pairs)
    # A developer is OpenAI's newer name of the system.
    messages.append({"role": "system" if role == "developer" else role, "content": content})
  return [model.encode_chat(messages)]


class Generation:
  """A request for texts, and the objects that answer it.

  Attributes:
    prompts: the tokens of each prompt.
    n: the number of texts for each prompt.
    max_tokens: the most tokens of a text.
    stop: texts before which an answer ends.
    use_beam_search: whether the texts are the best that beam search finds.
    is_stream: whether texts are sent while they are generated.
    has_usage: whether a stream ends with the number of tokens.
    num_generated: the number of tokens of the texts so far.
  """

  def __init__(self, given: Mapping[str, Any], model: ServedModel, is_chat: bool, max_texts: int):
    """Reads a request.

    Args:
      given: its fields, which are checked one by one.
      model: the model that will answer.
      is_chat: whether it has messages.
      max_texts: the most texts of an answer.

    Raises:
      RequestError: fields contradict one another, or the model cannot do what they ask for.
    """
    get, self._is_chat, self._top = given.get, is_chat, given.get("logprobs")
    if is_chat:
      self._top = get("top_logprobs", 0) if self._top else None
    self.prompts = encode_prompts(given, model)
    self.n, self.use_beam_search = get("n", 1), get("use_beam_search", False)
    self.max_tokens = get("max_completion_tokens", get("max_tokens", model.output_length))
    controls = {name: given[name] for name in CONTROLS if name in given}
    controls = {"seed": secrets.randbits(31), **controls}
    self._controls = SlotControls(**controls, reports_probabilities=self._top is not None)
    stop = get("stop", [])
    self.stop = [stop] if isinstance(stop, str) else stop
    self.is_stream = get("stream", False)
    self.has_usage = get("stream_options", {}).get("include_usage", False)
    self._check(given, model.output_length, max_texts)
    kind, name = ("chatcmpl", "chat.completion") if is_chat else ("cmpl", "text_completion")
    name += ".chunk" * (is_chat and self.is_stream)
    self._head = {"id": f"{kind}-{uuid.uuid4().hex}", "object": name, "created": int(time.time())}
    self._head["model"] = model.name
    self._lengths, self.num_generated = dict[int, int](), 0

  def _check(self, given: Mapping[str, Any], length: int, max_texts: int) -> None:
    most, num_prompts, has_top = self.max_tokens, len(self.prompts), self._top is not None
    name = "max_tokens" if given.get("max_tokens") == most else "max_completion_tokens"
    is_fitting = self.n * num_prompts <= max_texts
    conditions = [
      (name, most <= length, f"at most {length}, the server's --output_length"),
      ("max_tokens", given.get("max_tokens", most) == most, "equal to max_completion_tokens"),
      ("min_tokens", given.get("min_tokens", 0) <= most, f"at most {most}, the most tokens"),
      ("n", is_fitting, f"such that {num_prompts} prompts have at most {max_texts} texts"),
      ("stream_options", self.is_stream or not self.has_usage, "left out without stream"),
      ("top_logprobs", has_top or "top_logprobs" not in given, "left out without logprobs"),
    ]
    if self.use_beam_search:
      others = {key for key, value in given.items() if value or key == "seed"} - _OF_BEAM_SEARCH
      conditions += [(key, False, "left out with use_beam_search") for key in sorted(others)]
      conditions += [("logprobs", not has_top, "left out with use_beam_search")]
      conditions += [("n", self.n <= NUM_BEAMS, f"at most {NUM_BEAMS} with use_beam_search")]
    for name, holds, expected in conditions:
      if not holds:
        raise RequestError(f"{name} must be {expected}, got {given.get(name, 'its default')}", name)

  def texts(self) -> list[tuple[Sequence[int], SlotControls]]:
    """Returns the prompt and the controls of each text, whose seeds count up."""
    prompts = [prompt for prompt in self.prompts for _ in range(self.n)]
    return [
      (prompt, self._controls.replace(seed=(self._controls.seed + index) % 2**31))
      for index, prompt in enumerate(prompts)
    ]

  def answer(self, choices: Sequence[Mapping[str, Any]], **usage: Any) -> dict[str, Any]:
    """Returns an answer, or an object of a stream."""
    return {**self._head, "choices": choices, **usage}

  def usage(self) -> dict[str, int]:
    """Returns the numbers of tokens of the prompts and of the texts so far."""
    return usage(self.prompts, self.num_generated)

  def choice(self, index: int, piece: Piece) -> dict[str, Any]:
    """Returns the next piece of the text with this index, or the whole text."""
    role = {} if index in self._lengths else {"role": "assistant"}
    start = self._lengths.get(index, 0)
    self._lengths[index] = start + len(piece.text)
    self.num_generated += len(piece.tokens)
    logprobs: Any = None
    if self._top is not None:
      list_logprobs = _chat_logprobs if self._is_chat else _text_logprobs
      logprobs = list_logprobs(piece.tokens, self._top, start)
    kind = "delta" if self.is_stream else "message"
    text = {kind: {**role, "content": piece.text}} if self._is_chat else {"text": piece.text}
    return {"index": index, **text, "logprobs": logprobs, "finish_reason": piece.finish_reason}


def _text_logprobs(tokens: Sequence[Token], top: int, start: int) -> dict[str, Any]:
  lengths = (len(token.text) for token in tokens)
  rows = [(*token.top[:top], (token.text, token.logprob)) for token in tokens]
  return {
    "tokens": [token.text for token in tokens],
    "token_logprobs": [finite(token.logprob) for token in tokens],
    "top_logprobs": [{text: finite(number) for text, number in row} for row in rows],
    "text_offset": [*itertools.accumulate(lengths, initial=start)][:-1],
  }


def _chat_logprobs(tokens: Sequence[Token], top: int, start: int) -> dict[str, Any]:
  def shown(text: str, number: float) -> dict[str, Any]:
    return {"token": text, "logprob": finite(number), "bytes": [*text.encode()]}

  rows = [[shown(*each) for each in token.top[:top]] for token in tokens]
  pairs = zip(tokens, rows, strict=True)
  return {"content": [{**shown(t.text, t.logprob), "top_logprobs": row} for t, row in pairs]}


def finite(logprob: float) -> float:
  """Returns a log probability as a number that JSON has."""
  return max(float(logprob), _LOWEST)


def usage(prompts: Sequence[Sequence[int]], completion_tokens: int) -> dict[str, int]:
  """Returns the numbers of tokens of prompts and of the answer."""
  counts = {"prompt_tokens": sum(map(len, prompts)), "completion_tokens": completion_tokens}
  return {**counts, "total_tokens": sum(counts.values())}


def encode_vector(vector: Sequence[float], encoding: str) -> list[float] | str:
  """Returns a vector in an `encoding_format`."""
  as_bytes = np.asarray(vector, "<f4").tobytes()
  return base64.b64encode(as_bytes).decode() if encoding == "base64" else [*map(float, vector)]
