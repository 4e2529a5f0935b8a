"""The run of killed.py as one of two processes: `python two_processes.py FOLDER CHECKPOINT PORT INDEX`."""

from __future__ import annotations

import sys
import time

from rosetta_t5.distributed import join_processes


def with_pauses(make):
  """Lets chunks come no faster than they are written, so that a kill meets the others at work."""

  def make_slow(*args, **options):
    infer_fn = make(*args, **options)

    def run(*args, **options):
      result = infer_fn(*args, **options)
      time.sleep(1.5)
      return result

    return run

  return make_slow


if __name__ == "__main__":
  folder, checkpoint, port, index = sys.argv[1:]
  join_processes(True, f"localhost:{port}", process_count=2, process_index=int(index))
  import killed

  from rosetta_t5.inference import infer_fn
  from rosetta_t5.user_errors import exit_on_user_error

  infer_fn.get_infer_fn = with_pauses(infer_fn.get_infer_fn)
  with exit_on_user_error():
    killed.main(folder, checkpoint)
