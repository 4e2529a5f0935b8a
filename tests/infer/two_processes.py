"""The run of killed.py as one of two processes: `python two_processes.py FOLDER PORT INDEX`."""

from __future__ import annotations

import sys
import time

from rosetta_t5.distributed import join_processes


def pause(series, number, seconds):
  """Lets chunks come no faster than they are written, so that a kill meets the others at work."""
  if series == "inference_total_sec":
    time.sleep(1.5)


if __name__ == "__main__":
  folder, port, index = sys.argv[1:]
  join_processes(True, f"localhost:{port}", process_count=2, process_index=int(index))
  import killed

  from rosetta_t5 import infer
  from rosetta_t5.user_errors import exit_on_user_error

  infer.update_measurement_series = pause
  with exit_on_user_error():
    killed.main(folder)
