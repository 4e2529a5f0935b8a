"""The fields of requests: those of OpenAI's interface, and a few more, with the condition of each."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from rosetta_t5.argument_types import Condition, near_hint, one_of
from rosetta_t5.decoding.slots import SlotControls
from rosetta_t5.serving.engine import RequestError

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
_OF_TEXTS = {"prompt": _PROMPTS, "logprobs": _integer(0, 5), "best_of": _only(1)}
COMPLETION = {**_GENERATION, **_OF_TEXTS}
_MESSAGES = Condition(f"a list of 1 to {_MOST} messages", lambda x: _is_list(x, _is(dict)))
_OF_CHATS = {"messages": _MESSAGES, "logprobs": _FLAG, "top_logprobs": _integer(0, 5)}
CHAT = {**_GENERATION, **_OF_CHATS}
_CONTENT = Condition(
  "a text or a list of parts", lambda x: isinstance(x, str) or _is_list(x, _is(dict))
)
_ROLE = one_of(("system", "developer", "user", "assistant"))
MESSAGE = {"role": _ROLE, "content": _CONTENT, "refusal": _only(), "tool_calls": _only([])}
PART = {"type": one_of(("text",)), "text": _TEXT}
_FORMAT = one_of(("float", "base64"))
_OF_VECTORS = {"input": _PROMPTS, "encoding_format": _FORMAT}
EMBEDDING = {**_OF_VECTORS, "model": _TEXT, "user": _TEXT}
SCORE = {"inputs": _TEXTS, "targets": _TEXTS, "model": _TEXT}
_ONE_PROMPT = Condition("a text or a list of token ids", is_prompt)
_OF_ATTENTION = {"prompt": _ONE_PROMPT, "messages": _MESSAGES, "target": _TEXT}
ATTENTION = {**_OF_ATTENTION, "layer": _integer(-1000, 1000), "model": _TEXT}
