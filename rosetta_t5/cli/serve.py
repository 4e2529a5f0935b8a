"""`rosetta-t5 serve`, which answers requests over HTTP with models."""

import argparse
import os
import pathlib
import signal
import socket
import sys
from typing import Any

from rosetta_t5.cli import text_commands
from rosetta_t5.config.command_line import add_trust_option
from rosetta_t5.terminal import positive_integer, positive_number
from rosetta_t5.user_errors import ConfigError

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 serve`."""
  add = parser.add_argument
  text = "a run, a folder, or OWNER/NAME on the hub, named by its last part; can be repeated"
  add("--model_dir", action="append", help=text)
  text = "a PEFT folder, or a run with an adapter, for the first model; can be repeated"
  add("--adapter", action="append", metavar="NAME=PATH", help=text)
  text_commands.add_length_options(add)
  add("--host", default="127.0.0.1", help="an address of this machine (default: 127.0.0.1)")
  add("--port", type=int, default=8000, help="0 is any free one (default: 8000)")
  add("--token_file", help="lines of tokens, of which requests must have one")
  add = parser.add_argument_group("limits").add_argument
  for name, number, text in (
    ("slots", 16, "texts that are generated together"),
    ("max_waiting", 64, "texts that wait for a slot; more are refused"),
    ("max_body_kb", 1024, "kilobytes of a request"),
    ("timeout_s", 300, "seconds until an answer is complete"),
  ):
    kind = positive_number if name == "timeout_s" else positive_integer
    add(f"--{name}", type=kind, default=number, help=f"{text} (default: {number})")
  text_commands.add_decoding_options(parser)
  add_trust_option(parser)
  parser.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
  """Serves models until a signal ends it."""
  try:
    from rosetta_t5.serving import app
  except ModuleNotFoundError as error:
    text = f"serve needs the package {error.name}: pip install 'rosetta-t5[serve]'"
    raise ConfigError(text) from error
  if not options.model_dir:
    raise ConfigError("serve needs a model: give --model_dir RUN_OR_FOLDER")
  tokens = pathlib.Path(options.token_file).read_text().split() if options.token_file else []
  if options.token_file and not tokens:
    raise ConfigError(f"--token_file {options.token_file} has no token: write one on each line")
  is_local = options.host in _LOOPBACK
  if not (tokens or is_local):
    text = f"note: anyone who can reach {options.host} can use the models; set --token_file to require a token"
    print(text, file=sys.stderr)
  requests, body_bytes = options.slots + options.max_waiting, options.max_body_kb * 1024
  limits = app.Limits(body_bytes, options.timeout_s, requests, texts=options.max_waiting)
  # Older versions of Starlette compare what is before the first colon: "[" of an IPv6 address.
  hosts = ["*"] if tokens or not is_local else ["localhost", "127.0.0.1", "[::1]", "["]
  with socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET) as bound:
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # An address at which another server listens is an error before the models are read.
    try:
      bound.bind((options.host, options.port))
    except (OSError, OverflowError) as error:
      reason = getattr(error, "strerror", error)
      text = f"--host {options.host} --port {options.port} cannot be used ({reason}): give another"
      raise ConfigError(text) from error
    # Process 1 of a container would ignore SIGTERM until the web server handles it.
    for each in (signal.SIGINT, signal.SIGTERM):
      signal.signal(each, lambda number, _: os._exit(128 + number))
    app.serve(app.Application(_open_models(options), limits, tokens, hosts), bound)
  return 0


def _open_models(options: argparse.Namespace) -> dict[str, Any]:
  """Returns the models by name: those of --model_dir, and the first one with each --adapter."""
  from rosetta_t5 import decoding
  from rosetta_t5.serving import ServedModel
  from rosetta_t5.trained_model import open_model_dir

  given: dict[str, tuple[str, tuple[str, ...]]]
  given = {pathlib.Path(os.path.abspath(path)).name: (path, ()) for path in options.model_dir}
  for text in options.adapter or ():
    name, _, path = text.partition("=")
    if not path or name in given:
      expected = "NAME=PATH, with a name that no other model has"
      raise ConfigError(f"--adapter must be {expected}, got {text} (models: {', '.join(given)})")
    given[name] = options.model_dir[0], (path,)
  if len(given) < len(options.model_dir) + len(options.adapter or ()):
    raise ConfigError("the folders of --model_dir must have different last parts, their names")
  models: dict[str, Any] = {}
  for name, (path, adapters) in given.items():
    opened = open_model_dir(path, (), options.trust, adapters)
    *_, controls = text_commands.bound_controls(opened.model)
    controls |= text_commands.decoding_controls(options, opened.model)
    controls["pad_id"] = opened.model.pad_id
    lengths = text_commands.feature_lengths(opened.lengths, options)
    limits = (options.slots, options.max_waiting)
    models[name] = ServedModel(name, opened, lengths, *limits, decoding.Controls(**controls))
  return models
