"""The run of killed.py as one of two processes: `python two_processes.py FOLDER PORT INDEX`."""

from __future__ import annotations

import sys

import jax

if __name__ == "__main__":
  folder, port, index = sys.argv[1:]
  jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(index))
  import killed

  killed.main(folder)
