"""Runs shell commands in bash as they stand; `python -m t5x.…` and `rosetta-t5` run in this process."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import pathlib
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import gin
from forked_python import python

from rosetta_t5 import cli

# What turns a run of any size into two steps of a tiny T5.
TINY = [
  *(
    f"--gin.network.T5Config.{name}={value}"
    for name, value in {
      "emb_dim": 16,
      "num_heads": 2,
      "head_dim": 8,
      "mlp_dim": 32,
      "num_encoder_layers": 1,
      "num_decoder_layers": 1,
    }.items()
  ),
  "--gin.network.T5Config.dtype='float32'",
]
TINY_TRAINING = [
  *TINY,
  "--gin.train.relative_steps=2",
  "--gin.train.eval_steps=1",
  "--gin.BATCH_SIZE=8",
]
TINY_FINETUNING = [
  "--gin.TRAIN_STEPS=2",
  "--gin.EVAL_PERIOD=2",
  "--gin.utils.SaveCheckpointConfig.period=2",
]
# Plans are quick for one layer.
ONE_LAYER = [f"--gin.network.T5Config.num_{side}_layers=1" for side in ("encoder", "decoder")]
_RUNS = ("train", "eval", "infer", "export", "main", "precompile", "check")


def run_in_process(argv: Sequence[str], dry: bool) -> int:
  """Runs `python -m t5x.X …` or `rosetta-t5 …` and returns its exit status.

  Args:
    argv: the command.
    dry: whether runs are only checked (--dry_run) and plans are those of one layer. If not, runs are
      made tiny.
  """
  verb, *arguments = (argv[2].removeprefix("t5x."), *argv[3:]) if argv[0] == "python" else argv[1:]
  if verb in _RUNS and "--model_dir" not in arguments:
    arguments += TINY_TRAINING if verb == "train" else TINY
    arguments += ["--dry_run"] if dry and not {verb, *arguments} & {"check", "--dry_run"} else []
  if verb == "finetune" and "--dry_run" not in arguments:
    arguments += TINY_FINETUNING
  if verb == "plan" and dry:
    arguments += ONE_LAYER
  if verb == "vocab" and "--size" in arguments:
    size = int(arguments[arguments.index("--size") + 1])
    arguments += ["--size", str(min(size, 200))]  # the text has no more pieces
  if argv[0] != "python":
    return cli.main([verb, *arguments])
  importlib.import_module(f"t5x.{verb}").main([f"rosetta-t5 {verb}", *arguments])
  return 0


@contextlib.contextmanager
def _as_a_process(
  folder: str, environment: dict[str, str], stdin: str
) -> Iterator[tuple[io.StringIO, io.StringIO]]:
  """Yields the outputs of what runs inside, which leaves no trace in this process."""
  output, errors = io.StringIO(), io.StringIO()
  with (
    contextlib.chdir(folder),
    mock.patch.dict(os.environ, environment, clear=True),
    mock.patch.object(sys, "path", [folder, *sys.path]),
    mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()))),
    contextlib.redirect_stdout(output),
    contextlib.redirect_stderr(errors),
  ):
    try:
      yield output, errors
    finally:
      gin.clear_config()
      # A tf.data iterator that is freed while its thread calls Python waits forever for that thread,
      # which waits for Python's lock. In a process of its own, it would never be freed.
      gc.freeze()


def call(command: Callable[[], int | None], folder: str, environment: Any, stdin: str = "") -> Any:
  """Returns the exit status and both outputs of a command that runs in this process."""
  with _as_a_process(folder, environment, stdin) as (output, errors):
    try:
      status = command() or 0
    except SystemExit as ended:
      status = ended.code if isinstance(ended.code, int) else 1
  return status, output.getvalue(), errors.getvalue()


def run_script(script: str, folder: pathlib.Path, dry: bool) -> str:
  """Runs a bash script in a folder and returns its output; `dry` as in `run_in_process`.

  Raises:
    AssertionError: the script fails.
  """
  programs = folder / ".programs"
  programs.mkdir(exist_ok=True)
  address = str(programs / "socket")
  client = pathlib.Path(__file__).with_name("client.py")
  for name in ("python", "rosetta-t5"):
    (programs / name).write_text(
      f'#!/bin/sh\nexec {sys.executable} -SE {client} {address} {python()} {name} "$@"\n'
    )
    (programs / name).chmod(0o755)
  environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
  with socket.socket(socket.AF_UNIX) as server, tempfile.TemporaryFile("w+") as output:
    server.bind(address)
    server.listen()
    server.settimeout(0.05)
    with subprocess.Popen(
      ["bash", "-euo", "pipefail", "-c", script],
      cwd=folder,
      env=environment,
      stdin=subprocess.DEVNULL,
      stdout=output,
      stderr=subprocess.STDOUT,
    ) as bash:
      while bash.poll() is None:
        with contextlib.suppress(TimeoutError):
          _serve(server.accept()[0], dry)
    output.seek(0)
    text = output.read()
  pathlib.Path(address).unlink()
  assert bash.returncode == 0, f"{script}\n{text}"
  return text


def _serve(connection: socket.socket, dry: bool) -> None:
  with connection, connection.makefile() as received:
    connection.settimeout(None)
    request = json.load(received)
    argv = request.pop("argv")
    reply = call(lambda: run_in_process(argv, dry), **request)
    connection.sendall(json.dumps(reply).encode())


class Server:
  """A process of `rosetta-t5 serve` with few programs to compile.

  Attributes:
    url: its address, at a port that is free.
  """

  def __init__(self, command: str, folder: pathlib.Path):
    small = ["--port", "0", "--slots", "2", "--input_length", "32", "--output_length", "8"]
    program = [sys.executable, "-m", "rosetta_t5.cli", *shlex.split(command)[1:], *small]
    log = folder / "server.log"
    with log.open("w") as errors:
      self._process = subprocess.Popen(
        program, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True
      )
    assert self._process.stdout
    line = self._process.stdout.readline()
    assert line.startswith("serving "), line + log.read_text()
    self.url = line.split()[-1]

  def close(self) -> None:
    self._process.terminate()
    assert self._process.wait() == 0
    assert self._process.stdout
    self._process.stdout.close()
