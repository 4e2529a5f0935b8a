"""Runs that end after a signal or Ctrl-C, alone and with another process."""

from __future__ import annotations

import signal
import socket
import subprocess

from forked_python import python

PROGRAM = """
import signal, sys, time
import jax
from rosetta_t5.distributed import EvaluationInterrupted, InterruptionListener, until_interrupted

jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
with InterruptionListener():
  evaluated = 0
  try:
    for evaluated in until_interrupted(range(3000)):
      if evaluated == 3 and sys.argv[2] == "1":
        signal.raise_signal(signal.SIGTERM)
      time.sleep(0.02)
  except EvaluationInterrupted:
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


def test_the_first_ctrl_c_is_recorded_even_where_exceptions_are_swallowed_and_the_second_ends():
  program = """
import time
from rosetta_t5.distributed import InterruptionListener
with InterruptionListener() as listener:
  try:
    print("step", flush=True)
    while not listener.should_stop(): time.sleep(0.01)
  except BaseException:
    pass
  print(listener.by_ctrl_c, flush=True)
  import hashlib
  hashlib.pbkdf2_hmac("sha256", b"", b"", 500_000_000)  # one call in C
"""
  # A shell's background jobs, of which the tests may be one, ignore Ctrl-C.
  program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)" + program
  command = [python(), "-c", program]
  with subprocess.Popen(
    command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
  ) as process:
    for expected in ("step\n", "True\n"):
      assert process.stdout.readline() == expected
      process.send_signal(signal.SIGINT)
    errors = process.stderr.read()
  assert process.returncode == 130
  assert "Ctrl-C: the run finishes this step" in errors
