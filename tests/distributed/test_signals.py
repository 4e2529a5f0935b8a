"""Two processes that end together, after a signal to one of them."""

from __future__ import annotations

import socket
import subprocess

from forked_python import python

PROGRAM = """
import signal, sys, time
import jax
from rosetta_t5.distributed import InterruptionListener
from rosetta_t5.terminal import ctrl_c, progress

jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
with InterruptionListener("this finishes", "all is kept"):
  evaluated = 0
  try:
    for evaluated in progress.track(range(3000), "evaluating", together=True):
      if evaluated == 3 and sys.argv[2] == "1":
        signal.raise_signal(signal.SIGTERM)
      time.sleep(0.02)
  except ctrl_c.Interrupted:
    print("ended after", evaluated, flush=True)
"""


def test_an_evaluation_of_two_processes_ends_on_both_after_the_same_batch():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  processes = [
    subprocess.Popen(
      [python(), "-c", PROGRAM, address, str(index)], text=True, stdout=subprocess.PIPE
    )
    for index in range(2)
  ]
  outputs = [process.communicate(timeout=100)[0] for process in processes]
  assert outputs[0].startswith("ended after ")
  assert outputs[0] == outputs[1]
