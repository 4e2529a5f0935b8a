"""What the stand-ins for `python` and `rosetta-t5` run: it has the command run by server.py.

Usage: client.py SOCKET NAME ARGUMENT…
"""

import contextlib
import json
import os
import resource
import signal
import socket
import sys


def _is_closed(file: int) -> bool:
  try:
    os.fstat(file)
  except OSError:
    return True
  return False


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until they can be sent to the command
address, *argv = sys.argv[1:]
closed = [number for number in range(3) if _is_closed(number)]
connection = socket.socket(socket.AF_UNIX)
while connection.fileno() < 3:  # A closed standard file's number is taken by the next file.
  connection = socket.socket(fileno=os.dup(connection.detach()))
connection.connect(address)
umask = os.umask(0)
os.umask(umask)
limits = ("RLIMIT_AS", "RLIMIT_NOFILE", "RLIMIT_FSIZE")
request = {
  "argv": argv,
  "folder": os.getcwd(),
  "environment": dict(os.environ),
  "closed": closed,
  "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
  "umask": umask,
}
nothing = os.open(os.devnull, os.O_RDWR)
files = [nothing if number in closed else number for number in range(3)]
socket.send_fds(connection, [json.dumps(request).encode()], files)
reply = connection.makefile()
process = int(reply.readline())
for name in SIGNALS:
  signal.signal(name, lambda number, _: os.kill(process, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
status = int(reply.readline())
if status < 0:  # A signal has ended the command, so it ends this process too.
  with contextlib.suppress(OSError):  # SIGKILL cannot be set.
    signal.signal(-status, signal.SIG_DFL)
  os.kill(os.getpid(), -status)
sys.exit(status)
