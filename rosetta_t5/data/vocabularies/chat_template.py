"""Chat templates: renders conversations as Transformers does, and finds what the assistant wrote in them.

A template is a Jinja program that comes with a folder, so it runs in Jinja's sandbox and gets plain values.
"""

import datetime
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import ext, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]  # {"role": "user", "content": "Hello"}, and what else a template reads
Span = tuple[int, int]  # characters of a text

ASSISTANT = "assistant"
COLUMNS = ("messages", "conversations")
# The names of ShareGPT's rows.
_KEYS = {"from": "role", "value": "content"}
_ROLES = {"human": "user", "gpt": ASSISTANT}
_MARK = "\ufdd0"  # around what {% generation %} contains; no text has this character
_PROBE = "OK"  # the content of the messages with which `end_id` reads the template


def conversation_of(record: Mapping[str, Any], with_answer: bool = True) -> list[Message] | str:
  """Returns the messages of a row, or the reason why it has none.

  Args:
    record: a row with {"messages": [{"role", "content"}, …]} or {"conversations": [{"from", "value"}, …]}.
    with_answer: whether to return the last message too if it is the assistant's. In rows to train on, it is the
      answer, which a model that answers does not read.
  """
  turns = next((record[name] for name in COLUMNS if record.get(name)), None)
  if not isinstance(turns, list):
    return (
      "no conversation: expected a column 'messages' with [{'role', 'content'}, …] or 'conversations' "
      f"with [{{'from', 'value'}}, …] among {', '.join(map(repr, record))}"
    )
  messages: list[Message] = []
  for number, turn in enumerate(turns, 1):
    given: Message = turn if isinstance(turn, Mapping) else {}
    message = {_KEYS.get(key, key): value for key, value in given.items() if value is not None}
    if not (isinstance(message.get("role"), str) and len(message) > 1):
      expected = "'role' and 'content', or 'from' and 'value'"
      return f"message {number} must have {expected}, got {turn}"[:200]
    messages.append({**message, "role": _ROLES.get(message["role"], message["role"])})
  is_question = messages[-1]["role"] != ASSISTANT
  if not (with_answer or is_question or messages[1:]):
    return "the conversation has no message before the assistant's"
  return messages if with_answer or is_question else messages[:-1]


class ChatTemplate:
  """The chat template of a vocabulary's folder."""

  def __init__(self, vocabulary: Any):
    """Compiles the template.

    Args:
      vocabulary: a vocabulary of a tokenizer.json.

    Raises:
      ValueError: the folder has no template, or an invalid one.
    """
    folder = getattr(vocabulary, "folder", None)
    if folder is None or not folder.chat_template:
      where = folder.path if folder else type(vocabulary).__name__
      raise ValueError(
        f"{where} has no chat template: put chat_template.jinja beside the model's tokenizer.json, or use a "
        "model that was trained on conversations"
      )
    self._vocabulary, self._path, self._variables = vocabulary, folder.path, folder.named
    added = vocabulary.tokenizer.get_added_tokens_decoder().values()
    self._added = tuple(sorted((token.content for token in added), key=len, reverse=True))
    try:
      self._template = _environment().from_string(folder.chat_template)
    except jinja2.TemplateSyntaxError as error:
      raise ValueError(
        f"{folder.path}: the chat template is not valid: {error} (line {error.lineno})"
      ) from None

  def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
    """Returns a conversation as text, with special tokens.

    Args:
      messages: the conversation.
      add_generation_prompt: whether the beginning of the assistant's next turn follows.

    Raises:
      ValueError: the template refuses the conversation, such as an unknown role.
    """
    return self._render(messages, add_generation_prompt).replace(_MARK, "")

  def _render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
    try:
      return self._template.render(
        messages=messages,
        tools=None,
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **self._variables,
      )
    except Exception as error:  # A template is a program, which may raise anything.
      roles = ", ".join(message["role"] for message in messages)
      raise ValueError(
        f"the chat template in {self._path} refuses a conversation with the roles {roles}: {error}"
      ) from None

  def answers(self, messages: Sequence[Message]) -> Iterator[tuple[str, str, str]]:
    """Yields (prompt, answer, rest of the text) for each turn of the assistant.

    The answer ends with the token that ends a turn, if there is one; the rest is white space.

    Raises:
      ValueError: the template refuses the conversation, or its prompts do not begin its turns.
    """
    for number, message in enumerate(messages):
      if message["role"] != ASSISTANT:
        continue
      prompt, text = self.render(messages[:number], True), self.render(messages[: number + 1])
      if not text.startswith(prompt):
        raise ValueError(
          f"the chat template in {self._path} does not begin the assistant's turn with its generation "
          f"prompt: expected {text[len(prompt) - 40 :]!r} to begin as {prompt[-40:]!r}"
        )
      answer = text[len(prompt) :]
      kept = len(answer.rstrip()) if answer.rstrip().endswith(self._added) else len(answer)
      yield prompt, answer[:kept], answer[kept:]

  def rows(self, messages: Sequence[Message]) -> list[tuple[str, list[Span]]]:
    """Returns texts to train on, each with what the assistant wrote in it.

    A conversation is one text, unless the template renders a turn differently when others follow it. Then
    there are several. A template may mark what the assistant wrote with {% generation %}, as for Transformers.

    Raises:
      ValueError: see `answers`.
    """
    parts = self._render(messages).split(_MARK)
    if len(parts) > 1:
      ends = [sum(map(len, parts[: n + 1])) for n in range(len(parts))]
      return [("".join(parts), list(zip(ends[:-1:2], ends[1::2], strict=True)))]
    rows: list[tuple[str, list[Span]]] = []
    for prompt, answer, rest in self.answers(messages):
      span = len(prompt), len(prompt) + len(answer)
      before = rows.pop()[1] if rows and prompt.startswith(rows[-1][0]) else []
      rows.append((prompt + answer + rest, [*before, span]))
    return rows

  def end_id(self) -> int:
    """Returns the id of the token that ends the assistant's turn: the vocabulary's end token by default."""
    messages = [{"role": role, "content": _PROBE} for role in ("user", ASSISTANT)]
    rest = self.render(messages).rpartition(_PROBE)[2]
    found = re.search("|".join(map(re.escape, self._added)) or "(?!)", rest)
    return int(self._vocabulary.encode(found[0])[-1] if found else self._vocabulary.eos_id)


@functools.cache
def _environment() -> jinja2.Environment:
  """Returns Jinja as Transformers sets it up."""
  environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
  )
  environment.filters["tojson"] = _to_json
  environment.globals["raise_exception"] = _raise
  environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
  return environment


class _Generation(ext.Extension):
  """Marks what {% generation %} … {% endgeneration %} contains."""

  tags = {"generation"}  # noqa: RUF012

  def parse(self, parser: Any) -> nodes.Node:
    line = next(parser.stream).lineno
    body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

  def _mark(self, caller: Any) -> str:
    return f"{_MARK}{caller()}{_MARK}"


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
  """Returns JSON without Jinja's escapes for HTML."""
  return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
  raise jinja2.TemplateError(message)
