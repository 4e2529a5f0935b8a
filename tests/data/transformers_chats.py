"""Chat templates in the styles of published ones, and conversations.

`transformers_chats.json` has what Transformers makes of them. To record it anew, run this file where
Transformers is installed.
"""

from __future__ import annotations

import json
import pathlib
import tempfile
from typing import Any

from transformers_tokenizers import write_folder

RECORDED = pathlib.Path(__file__).with_name("transformers_chats.json")
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
HEADERS = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = 'Be brief.' %}
    {%- set rest = messages %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nTools: ' ~ (tools is not none) ~ '\\n\\n' }}
{{- system + '<|eot_id|>' }}
{%- for message in rest %}
    {%- if message.role == 'tool' %}
        {%- continue %}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
TURNS = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {{ raise_exception('System role not supported') }}
{%- endif -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""
# It shows thoughts only after the last question, as Qwen 3 does, writes JSON, and uses a namespace, a macro and blocks.
THOUGHTS = """\
{%- macro turn(name, text) %}
<|im_start|>{{ name }}
{{ text }}<|im_end|>
{% endmacro %}
{%- set last = namespace(index=-1) %}
{% for message in messages %}
    {% if message.role == 'user' %}{% set last.index = loop.index0 %}{% endif %}
{% endfor %}
{%- for message in messages %}
    {%- set text = message.content %}
    {%- if message.role == 'assistant' and loop.index0 < last.index %}
        {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- turn(message.role, text) }}
    {%- if message.name is defined %}{{ {'name': message.name, 'é': [1, '<']} | tojson }}{% endif %}
{%- endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
GENERATION = """\
{% for message in messages %}
{% if message.role == 'assistant' %}
assistant: {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}

{% else %}
{{ message.role }}: {{ message.content }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
assistant: {% endif %}
"""
# The template's name → the tokenizer and the template.
TEMPLATES = {
  "chatml": ("qwen", CHATML),
  "headers": ("llama", HEADERS),
  "turns": ("gemma", TURNS),
  "thoughts": ("qwen", THOUGHTS),
  **{f"generation-{case}": (case, GENERATION) for case in ("llama", "qwen", "gemma")},
}


def _messages(*texts: str, system: str = "") -> list[dict[str, Any]]:
  roles = ["user", "assistant"] * len(texts)
  turns = [{"role": r, "content": x} for r, x in zip(roles, texts, strict=False)]
  return [{"role": "system", "content": system}, *turns] if system else turns


CONVERSATIONS = {
  "question": _messages("Who are you?"),
  "answered": _messages("Who?", "A model.\n"),
  "long": _messages(
    " a\n\nb ", "<think>\nhm\n</think>\n\nć 👩‍👩‍👧‍👦!", "और?", "<think>x</think>\n\n  yes\n\n"
  ),
  "system": _messages("Hi", "Hello", "Bye", system="Be <kind> & 'brief'.  "),
  "tool": [*_messages("Hi"), {"role": "tool", "content": "3", "name": "né"}],
  "two users": [*_messages("a"), *_messages("b")],
}


def write_chat_folder(name: str, folder: pathlib.Path) -> None:
  case, template = TEMPLATES[name]
  write_folder(case, folder)
  (folder / "chat_template.jinja").write_text(template)


def main() -> None:
  from transformers import AutoTokenizer

  found: dict[str, Any] = {}
  for name in TEMPLATES:
    with tempfile.TemporaryDirectory() as folder:
      write_chat_folder(name, pathlib.Path(folder))
      tokenizer = AutoTokenizer.from_pretrained(folder)
      found[name] = {key: _made(tokenizer, rows) for key, rows in CONVERSATIONS.items()}
  RECORDED.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def _made(tokenizer: Any, messages: list[dict[str, Any]]) -> dict[str, Any] | str:
  def render(**options: Any) -> Any:
    return tokenizer.apply_chat_template(messages, **options)

  try:
    text, prompt = (render(tokenize=False, add_generation_prompt=x) for x in (False, True))
  except Exception as error:
    return str(error)
  tokens = render(return_assistant_tokens_mask=True, return_dict=True)
  made = {"text": text, "prompt": prompt, "ids": tokens["input_ids"]}
  return made | {"mask": tokens["assistant_masks"]}


if __name__ == "__main__":
  main()
