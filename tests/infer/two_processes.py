"""The run of killed.py as one of two processes: `python two_processes.py FOLDER PORT INDEX`."""

from __future__ import annotations

import sys
import time

import jax


def pause(series, number, seconds):
  """Lets chunks come no faster than they are written, so that a kill meets the others at work."""
  if series == "inference_total_sec":
    time.sleep(1.5)


if __name__ == "__main__":
  folder, port, index = sys.argv[1:]
  jax.distributed.initialize(
    f"localhost:{port}", num_processes=2, process_id=int(index), heartbeat_timeout_seconds=45
  )
  import killed

  from rosetta_t5 import infer
  from rosetta_t5.user_errors import exit_on_user_error

  infer.update_measurement_series = pause
  with exit_on_user_error():
    killed.main(folder)
