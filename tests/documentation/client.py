"""What `python` and `rosetta-t5` are inside a snippet: sends the command to the test's process.

Usage: client.py SOCKET PYTHON NAME ARGUMENT…
"""

import json
import os
import socket
import sys

address, python, *argv = sys.argv[1:]
if argv[0] == "python" and (argv[1] != "-m" or not argv[2].startswith("t5x.")):
  os.execv(python, [python, *argv[1:]])
with socket.socket(socket.AF_UNIX) as connection:
  connection.connect(address)
  request = {"argv": argv, "folder": os.getcwd(), "environment": dict(os.environ)}
  connection.sendall(json.dumps({**request, "stdin": sys.stdin.read()}).encode())
  connection.shutdown(socket.SHUT_WR)
  with connection.makefile() as reply:
    status, output, errors = json.load(reply)
sys.stdout.write(output)
sys.stderr.write(errors)
sys.exit(status)
