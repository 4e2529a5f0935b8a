"""`rosetta-t5 chat`: a conversation with a model, or blanks that it fills."""

import argparse
import contextlib
import io
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rosetta_t5.cli import text_commands
from rosetta_t5.config.command_line import add_trust_option


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 chat`."""
  add = parser.add_argument
  add("model_dir", help="a model with a chat template, or one trained by span corruption")
  add("--system", help="a message of the system before the conversation")
  text_commands.add_adapter_option(add)
  text_commands.add_length_options(add)
  text_commands.add_decoding_options(parser)
  add_trust_option(parser)
  parser.set_defaults(run=chat)


def chat(options: argparse.Namespace) -> int:
  """Answers messages from the terminal by the model's chat template; without one, fills blanks in sentences."""
  from rosetta_t5.data.vocabularies.sentencepiece_models import sentinel_ids
  from rosetta_t5.inference.text_inference import BLANK, blank_filler
  from rosetta_t5.trained_model import open_model_dir

  model = open_model_dir(options.model_dir, (), options.trust, options.adapter)
  text_commands.apply_decoding_options(options, model.model)
  vocabulary = model.model.input_vocabulary
  lengths = text_commands.feature_lengths(model.lengths, options)
  folder = getattr(vocabulary, "folder", None)  # of a tokenizer.json
  has_template = folder and (folder.chat_template or not sentinel_ids(vocabulary))
  if has_template or "inputs" not in model.lengths:
    reply = _conversation_with(model, lengths, options.system)
    print("Type a message. An empty line ends.", flush=True)
  else:
    reply = blank_filler(model.model, model.state.params, lengths["inputs"])
    print(f"Type text with blanks, such as: The sky is {BLANK}. An empty line ends.", flush=True)
  if isinstance(sys.stdin, io.TextIOWrapper):
    sys.stdin.reconfigure(errors="replace")  # Invalid UTF-8 is shown, and can be typed again.
  with contextlib.suppress(EOFError):
    while text := input("> ").strip():
      try:
        print(reply(text), flush=True)
      except ValueError as error:  # An error in one line does not end the command.
        print(error, flush=True)
  return 0


def _conversation_with(
  model: Any, lengths: Mapping[str, int], system: str | None
) -> Callable[[str], str]:
  """Returns a function that answers a message, given those before it.

  Raises:
    ValueError: the model has no chat template.
  """
  from rosetta_t5.inference.text_inference import ChatPrompts, TextInference

  prompts = ChatPrompts(model.model)
  size = model.partitioner.data_mesh_size
  texts = TextInference(model.model, model.partitioner, model.state_axes, size, lengths)
  messages = [{"role": "system", "content": system}] if system else []

  def reply(text: str) -> str:
    asked = [*messages, {"role": "user", "content": text}]
    if texts.count_truncated([{"input": prompts(asked), "target": ""}]):
      print(f"note: only the last {lengths['inputs']} tokens are read: see --input_length")
    answer = prompts.answer(asked, texts, model.state)
    messages[:] = [*asked, {"role": "assistant", "content": answer}]
    return answer

  return reply
