"""Starts commands in processes forked from this one, which has imported all slow packages.

Usage: server.py LISTENER [seqio]. LISTENER is a socket that this process inherits. Each connection (from client.py) sends a
command, its environment and its three standard files. It receives the process id, and later the exit
status. A connection that closes early means that the client was killed; its command is killed too. The
server ends with its standard input.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
import types
from typing import Any

# The script's folder, which Python has put there.
del sys.path[0]


def _import_packages() -> dict[str, str]:
  """Imports what is slow to import; returns the environment variables that this has set."""
  before = set(os.environ)
  import rosetta_t5.cli
  import rosetta_t5.infer
  import rosetta_t5.train  # noqa: F401

  if "seqio" in sys.argv:
    from rosetta_t5.data.tensorflow_import import import_seqio

    import_seqio()
  gc.freeze()  # The children share these objects; collecting garbage among them would copy them.
  return {name: value for name, value in os.environ.items() if name not in before}


def _run(argv: list[str]) -> None:
  """Runs the command as the main program of this process."""
  program, *arguments = argv
  search = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
  if program == "rosetta-t5":
    from rosetta_t5 import cli

    sys.argv, sys.path[:0] = argv, search
    sys.exit(cli.main(arguments))
  elif arguments[0] == "-m":
    sys.argv, sys.path[:0] = arguments[1:], [os.getcwd(), *search]
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
  elif arguments[0] == "-c":
    sys.argv, sys.path[:0] = ["-c", *arguments[2:]], ["", *search]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
  else:
    sys.argv, sys.path[:0] = arguments, [os.path.dirname(os.path.abspath(arguments[0])), *search]
    runpy.run_path(arguments[0], run_name="__main__")


def _configure_jax() -> None:
  """Sets the options that jax would have read from the environment at its import."""
  import jax

  for name, default in jax.config.values.items():
    if (value := os.environ.get(name.upper())) is None:
      continue
    if isinstance(default, bool):
      jax.config.update(name, value.lower() in ("y", "yes", "t", "true", "on", "1"))
    else:
      jax.config.update(name, type(default)(value) if isinstance(default, int | float) else value)


def _become(request: dict[str, Any], files: list[int], set_by_imports: dict[str, str]) -> None:
  """Gives this process the client's standard files, environment, folder and limits."""
  os.setpgid(0, 0)
  for number, file in enumerate(files):
    os.dup2(file, number)
    os.close(file)
  for number in request["closed"]:
    os.close(number)
  ours = os.environ.get("PYTHONPATH", "").split(os.pathsep)
  sys.path[:] = [entry for entry in sys.path if entry not in ours]  # The command has its own.
  os.environ.clear()
  os.environ.update(set_by_imports | request["environment"])
  _configure_jax()
  for limit, values in request["limits"].items():
    resource.setrlimit(getattr(resource, limit), values)
  os.umask(request["umask"])
  os.chdir(request["folder"])
  open_file = (None if n in request["closed"] else n for n in range(3))
  for name, number, mode in zip(("stdin", "stdout", "stderr"), open_file, "rww", strict=True):
    file = None if number is None else os.fdopen(number, mode, closefd=False)
    setattr(sys, name, file)
    setattr(sys, f"__{name}__", file)
  if sys.stderr is not None:
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _serve(connection: socket.socket, set_by_imports: dict[str, str]) -> None:
  """Runs one command in a child of this process, and reports its process id and status."""
  text, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
  request = json.loads(text)
  command = os.fork()
  if command == 0:
    connection.close()
    _become(request, files, set_by_imports)
    _run(request["argv"])
    sys.exit()
  for file in files:
    os.close(file)
  with contextlib.suppress(BrokenPipeError):  # The client may be killed at any time.
    connection.sendall(f"{command}\n".encode())
  ended = os.pidfd_open(command)
  if ended not in select.select([connection, ended], [], [])[0]:
    os.kill(command, signal.SIGKILL)
  status = os.waitpid(command, 0)[1]
  with contextlib.suppress(BrokenPipeError):
    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def main(listener: int) -> None:
  set_by_imports = None
  with socket.socket(fileno=listener) as server:
    while server in select.select([server, sys.stdin], [], [])[0]:
      connection, _ = server.accept()
      if set_by_imports is None:
        set_by_imports = _import_packages()
      if os.fork() == 0:
        server.close()
        _serve(connection, set_by_imports)
        os._exit(0)  # without what Python does at the end of a program
      connection.close()
      _count_processor_time()
  _count_processor_time()


def _count_processor_time() -> None:
  """Waits for the processes that have served, whose time is then part of this process's."""
  with contextlib.suppress(ChildProcessError):
    while os.waitpid(-1, os.WNOHANG)[0]:
      pass


if __name__ == "__main__":
  main(int(sys.argv[1]))
