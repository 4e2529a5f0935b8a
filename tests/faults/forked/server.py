"""Starts commands in processes forked from this one, which has imported all slow packages.

Usage: server.py SOCKET. Each connection (from client.py) sends a command, its environment and its three
standard files. It receives the process id, and later the exit status. A connection that closes early
means that the client was killed; its command is killed too.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
import traceback
from typing import Any

import jax

import rosetta_t5.cli
import rosetta_t5.infer
import rosetta_t5.train
from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_seqio


def _run(argv: list[str]) -> int:
  """Runs the command in this process, and returns its exit status."""
  program, *arguments = argv
  try:
    if program == "rosetta-t5":
      sys.argv = argv
      return rosetta_t5.cli.main(arguments) or 0
    sys.path.insert(0, os.getcwd())  # as Python does, and the command rosetta-t5 does not
    if arguments[:1] == ["-m"]:
      sys.argv = arguments[1:]
      runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[:1] == ["-c"]:
      sys.argv = ["-c", *arguments[2:]]
      exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
      sys.argv = arguments
      runpy.run_path(arguments[0], run_name="__main__")
  except SystemExit as end:
    if not isinstance(end.code, str):
      return end.code or 0
    print(end.code, file=sys.stderr)
    return 1
  except BaseException:
    traceback.print_exc()
    return 1
  return 0


def _become(request: dict[str, Any], files: list[int]) -> None:
  """Gives this process the client's standard files, environment, folder, limits and user."""
  os.setpgid(0, 0)
  for number, file in enumerate(files):
    os.dup2(file, number)
    os.close(file)
  for number in request["closed"]:
    os.close(number)
  os.environ.clear()
  os.environ.update(request["environment"])
  for name, value in request["environment"].items():
    if name.startswith("JAX_") and name.lower() in jax.config.values:
      jax.config.update(name.lower(), json.loads(value) if value[:1].isdigit() else value)
  for limit, values in request["limits"].items():
    resource.setrlimit(getattr(resource, limit), values)
  os.umask(request["umask"])
  os.chdir(request["folder"])
  os.setgroups([request["gid"]])
  os.setgid(request["gid"])
  os.setuid(request["uid"])
  open_file = (None if n in request["closed"] else n for n in range(3))
  for name, number, mode in zip(("stdin", "stdout", "stderr"), open_file, "rww", strict=True):
    file = None if number is None else os.fdopen(number, mode, closefd=False)
    setattr(sys, name, file)
    setattr(sys, f"__{name}__", file)
  if sys.stderr is not None:
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _serve(connection: socket.socket) -> None:
  """Runs one command in a child of this process, and reports its process id and status."""
  text, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
  request = json.loads(text)
  command = os.fork()
  if command == 0:
    connection.close()
    _become(request, files)
    sys.exit(_run(request["argv"]))
  for file in files:
    os.close(file)
  connection.sendall(f"{command}\n".encode())
  ended = os.pidfd_open(command)
  if ended not in select.select([connection, ended], [], [])[0]:
    os.kill(command, signal.SIGKILL)
  status = os.waitpid(command, 0)[1]
  connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def main(address: str) -> None:
  import_seqio()
  gc.freeze()  # The children share these objects; collecting garbage among them would copy them.
  signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for the processes that serve.
  with socket.socket(socket.AF_UNIX) as server:
    server.bind(address)
    server.listen()
    while True:
      connection, _ = server.accept()
      if os.fork() == 0:
        server.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _serve(connection)
        return
      connection.close()


if __name__ == "__main__":
  main(sys.argv[1])
