"""Saves with two processes of two devices each, for a test: two_processes.py FOLDER PORT INDEX."""

from __future__ import annotations

import pathlib
import sys

import jax

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")

sys.path.insert(0, str(pathlib.Path(__file__).parent))


def main(folder: pathlib.Path, port: str, index: int) -> None:
  jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=index)
  from tiny_state import Counter, Setup

  setup, counter = Setup(num_partitions=2), Counter()
  manager = setup.manager(folder, dataset_iterator=counter, keep=1, run_facts={"random_seed": 5})
  for step in (1, 2):
    counter.position = 10 * index + step
    manager.save(setup.state(step=step))
  manager.close()
  counter.position = 0
  restored = setup.manager(folder, dataset_iterator=counter).restore()
  print("restored", int(restored.step), "at", counter.position, flush=True)


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
