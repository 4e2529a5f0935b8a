"""Two processes of two devices each, for tests: two_processes.py FOLDER PORT INDEX WHAT.

WHAT is "save", or "restart" to start as a run whose checkpoints are in FOLDER.
"""

from __future__ import annotations

import hashlib
import pathlib
import sys
from typing import Any

import jax
import numpy as np

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")

sys.path.insert(0, str(pathlib.Path(__file__).parent))


def split_setup() -> Any:
  """Returns a setup in which each process stores different parts of the parameters, in its own file."""
  from tiny_state import Setup, Tiny

  return Setup(module=Tiny(width=4096), num_partitions=4)


def save(folder: pathlib.Path, index: int) -> None:
  from tiny_state import Counter, Setup

  setup, counter = Setup(num_partitions=2), Counter()
  manager = setup.manager(folder, dataset_iterator=counter, keep=1)
  manager.run_facts["random_seed"] = 5
  for step in (1, 2):
    counter.position = 10 * index + step
    manager.save(setup.state(step=step))
  manager.close()
  counter.position = 0
  restored = setup.manager(folder, dataset_iterator=counter).restore()
  print("restored", int(restored.step), "at", counter.position, flush=True)

  setup = split_setup()
  manager = setup.manager(folder / "split")
  for step in (1, 2):
    manager.save(setup.state(step=step))
  manager.close()


def restart(folder: pathlib.Path) -> None:
  from rosetta_t5.checkpoints import (
    CheckpointConfig,
    SaveCheckpointConfig,
    create_checkpoint_manager_and_restore,
    find_start_checkpoint,
  )
  from rosetta_t5.checkpoints.run_start import lock_model_dir

  setup, save_cfg = split_setup(), SaveCheckpointConfig(period=1)
  with lock_model_dir(folder):
    cfg, path = find_start_checkpoint(CheckpointConfig(save=save_cfg), folder)
    state, manager = create_checkpoint_manager_and_restore(
      setup.initializer, setup.partitioner, cfg, path, None, save_cfg, folder
    )
    print("restored", int(state.step), "of", manager.all_steps(), flush=True)
    for shard in state.params["wi"].addressable_shards:
      columns = shard.index[1]
      digest = hashlib.sha256(np.ascontiguousarray(shard.data)).hexdigest()
      print("wi", columns.start, columns.stop, digest, flush=True)


def main(folder: pathlib.Path, port: str, index: int, what: str) -> None:
  jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=index)
  save(folder, index) if what == "save" else restart(folder)


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
