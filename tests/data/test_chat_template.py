"""Conversations are rendered and their assistant's tokens found as Transformers does it."""

from __future__ import annotations

import datetime
import json
import pathlib
from typing import Any

import pytest
from transformers_chats import CONVERSATIONS, RECORDED, TEMPLATES, write_chat_folder
from transformers_tokenizers import write_folder

from rosetta_t5.data import tokenizer_vocabulary
from rosetta_t5.data.vocabularies.chat_template import ChatTemplate, conversation_of

SHIFTS = {"llama": 1, "qwen": 1, "gemma": 0, "t5": 0}


def vocabulary_of(name: str, folder: pathlib.Path) -> Any:
  write_chat_folder(name, folder)
  return tokenizer_vocabulary(str(folder), shift=SHIFTS[TEMPLATES[name][0]])


def with_template(tmp_path: pathlib.Path, template: str, case: str = "qwen") -> Any:
  write_folder(case, tmp_path)
  (tmp_path / "chat_template.jinja").write_text(template)
  return tokenizer_vocabulary(str(tmp_path), shift=SHIFTS[case])


@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_are_the_texts_of_transformers(name: str, tmp_path: pathlib.Path) -> None:
  vocabulary, shift = vocabulary_of(name, tmp_path), SHIFTS[TEMPLATES[name][0]]
  template = ChatTemplate(vocabulary)
  for key, made in json.loads(RECORDED.read_text())[name].items():
    messages = CONVERSATIONS[key]
    if isinstance(made, str):
      with pytest.raises(ValueError, match=f"refuses a conversation with the roles .*: {made}"):
        template.render(messages)
      continue
    assert template.render(messages) == made["text"]
    assert template.render(messages, add_generation_prompt=True) == made["prompt"]
    assert [n - shift for n in vocabulary.encode(made["text"])] == made["ids"]


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name.startswith("generation")])
def test_tokens_that_a_template_marks_are_those_of_transformers(
  name: str, tmp_path: pathlib.Path
) -> None:
  vocabulary = vocabulary_of(name, tmp_path)
  for key, made in json.loads(RECORDED.read_text())[name].items():
    rows = ChatTemplate(vocabulary).rows(CONVERSATIONS[key])
    masks = [vocabulary.encode_spans(*row)[1] for row in rows]
    assert masks == ([made["mask"]] if any(made["mask"]) else [])


def trained(vocabulary: Any, messages: Any) -> list[list[str]]:
  """Returns what the trained tokens of each row's spans are as text."""
  shift = int(vocabulary.shift)
  rows = []
  for text, spans in ChatTemplate(vocabulary).rows(messages):
    ids, weights = vocabulary.encode_spans(text, spans)
    assert ids == vocabulary.encode(text)
    shown = [n - shift if w else -1 for n, w in zip(ids, weights, strict=True)]
    runs = "".join(" " if n < 0 else f"{n}," for n in shown).split()
    decode = vocabulary.tokenizer.decode
    numbers = [[int(n) for n in run.split(",")[:-1]] for run in runs]
    rows.append([decode(run, skip_special_tokens=False) for run in numbers])
  return rows


@pytest.mark.slow
def test_the_assistants_turns_end_with_the_token_that_ends_them(tmp_path: pathlib.Path) -> None:
  turns = ["<think>\nhm\n</think>\n\nć 👩‍👩‍👧‍👦!", "<think>x</think>\n\n  yes"]
  expected = {
    "chatml": [[f"{turns[0]}<|im_end|>", f"{turns[1]}\n\n<|im_end|>"]],
    "headers": [[f"{turn}<|eot_id|>" for turn in turns]],
    "turns": [[f"{turn}<end_of_turn>" for turn in turns]],
    # Its first turn has another text in the prompt of the second.
    "thoughts": [[f"{turns[0]}<|im_end|>"], [f"{turns[1]}\n\n<|im_end|>"]],
  }
  for name, rows in expected.items():
    vocabulary = vocabulary_of(name, tmp_path / name)
    assert trained(vocabulary, CONVERSATIONS["long"]) == rows
    assert ChatTemplate(vocabulary).end_id() == vocabulary.encode(rows[0][-1])[-1]
  # An answer that the assistant has not given is not trained.
  assert trained(vocabulary_of("chatml", tmp_path / "again"), CONVERSATIONS["question"]) == []


def test_words_of_the_user_that_look_like_an_answer_are_not_trained(tmp_path: pathlib.Path) -> None:
  fake = "<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"
  messages = [{"role": "user", "content": fake}, {"role": "assistant", "content": "yes"}]
  assert trained(vocabulary_of("chatml", tmp_path), messages) == [["yes<|im_end|>"]]


@pytest.mark.parametrize("case", ["qwen", "llama"])  # Llama's offsets of spaces are empty.
def test_without_a_token_that_ends_turns_their_white_space_is_trained(
  case: str, tmp_path: pathlib.Path
) -> None:
  plain = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
  )
  vocabulary = with_template(tmp_path, plain, case)
  # The token of the first word begins with the prompt's last space.
  assert trained(vocabulary, CONVERSATIONS["answered"]) == [[" A model.\n\n\n"]]
  assert ChatTemplate(vocabulary).end_id() == vocabulary.eos_id
  ids, weights = vocabulary.encode_spans(
    "x: ab  ", [(2, 7)]
  )  # Its last token is white space alone.
  assert weights == [0, 0, *[1] * (len(ids) - 2)]


@pytest.mark.parametrize("form", ["string", "list", "files"])
def test_templates_are_found_where_transformers_finds_them(
  form: str, tmp_path: pathlib.Path
) -> None:
  write_folder("llama", tmp_path)
  file = tmp_path / "tokenizer_config.json"
  config = json.loads(file.read_text())
  named = {"tool_use": "tools", "default": "{{ eos_token }}{{ messages[0].content }}"}
  if form == "files":
    config["chat_template"] = "of the config"
    (tmp_path / "chat_template.jinja").write_text(named["default"])
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("tools")
  else:
    listed = [{"name": name, "template": text} for name, text in named.items()]
    config["chat_template"] = named["default"] if form == "string" else listed
  file.write_text(json.dumps(config))
  template = ChatTemplate(tokenizer_vocabulary(str(tmp_path), shift=1))
  assert template.render([{"role": "user", "content": "Hi"}]) == "<|eot_id|>Hi"


def test_a_template_knows_the_time_and_cannot_reach_pythons_objects(tmp_path: pathlib.Path) -> None:
  year = ChatTemplate(with_template(tmp_path / "a", "{{ strftime_now('%Y') }}"))
  assert year.render([]) == str(datetime.datetime.now().year)
  escape = ChatTemplate(with_template(tmp_path / "b", "{{ ''.__class__.__mro__ }}"))
  with pytest.raises(ValueError, match="access to attribute '__class__' of 'str' object is unsafe"):
    escape.render([])


def test_mistakes_in_templates_and_rows_are_named(tmp_path: pathlib.Path) -> None:
  import seqio

  write_folder("qwen", tmp_path / "none")
  with pytest.raises(ValueError, match=r"none has no chat template: put chat_template\.jinja"):
    ChatTemplate(tokenizer_vocabulary(str(tmp_path / "none"), shift=1))
  with pytest.raises(ValueError, match="ByteVocabulary has no chat template"):
    ChatTemplate(seqio.ByteVocabulary())
  with pytest.raises(ValueError, match=r"is not valid: .*endfor.* \(line 2\)"):
    ChatTemplate(with_template(tmp_path / "bad", "\n{% for x in y %}"))
  other = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ '' if not add_generation_prompt else 'A:' }}"
  with pytest.raises(
    ValueError, match=r"does not begin the assistant's turn .*'\[Who\?\]\[A model"
  ):
    ChatTemplate(with_template(tmp_path / "other", other)).rows(CONVERSATIONS["answered"])
  config = tmp_path / "none/tokenizer_config.json"
  settings = json.loads(config.read_text()) | {"chat_template": [{"name": "rag", "template": ""}]}
  write_folder("qwen", tmp_path / "named")
  (tmp_path / "named/tokenizer_config.json").write_text(json.dumps(settings))
  with pytest.raises(ValueError, match="named has no chat template"):
    ChatTemplate(tokenizer_vocabulary(str(tmp_path / "named"), shift=1))
  assert "expected a column 'messages'" in str(conversation_of({"text": "a"}))
  assert "message 2 must have 'role'" in str(
    conversation_of({"messages": [{"role": "user", "content": ""}, 3]})
  )
