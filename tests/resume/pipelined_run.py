"""Trains a scanned model on a mesh, alone or as one of several processes with one CPU device each.

pipelined_run.py MODEL_DIR STEPS SIGTERM_AFTER MESH [ADDRESS INDEX COUNT]; MESH is JSON. It saves every
step, prints losses like killable_run.py, and continues with the batch after its last checkpoint.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Iterator

import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import killable_run
import tiny_models

from rosetta_t5 import checkpoints
from rosetta_t5.distributed.coordination import join_processes
from rosetta_t5.parallel import PjitPartitioner

BATCH = 8
CONFIG = tiny_models.GPT.replace(num_layers=4, scan_layers=True, dropout_rate=0.1)


def batches(first: int, shard: int, num_shards: int) -> Iterator[dict[str, np.ndarray]]:
  """Yields the shard's rows of the batches that follow the first ones."""
  seed = first
  rows = slice(shard * BATCH // num_shards, (shard + 1) * BATCH // num_shards)
  while True:
    batch = tiny_models.make_batch(BATCH, 8, 8, seed=seed)
    yield {n: np.asarray(x)[rows] for n, x in batch.items() if n.startswith("decoder")}
    seed += 1


def run(model_dir: str, steps: int, sigterm_after: int, mesh: dict[str, int], devices=None) -> None:
  done = checkpoints.all_steps(model_dir) if pathlib.Path(model_dir).exists() else []
  partitioner = PjitPartitioner(mesh=mesh)
  killable_run.run(
    model_dir,
    steps,
    1,
    sigterm_after,
    BATCH,
    model=tiny_models.make_decoder_only_model(CONFIG),
    checkpoint_cfg=killable_run.checkpoint_config(1, save_dataset=False),
    partitioner=partitioner if devices is None else partitioner.on_devices(devices),
    get_dataset_fn=lambda cfg, shard, num_shards, converter: batches(
      done[-1] if done else 0, shard, num_shards
    ),
  )


if __name__ == "__main__":
  folder, number, after, sizes, *identity = sys.argv[1:]
  jax.config.update("jax_num_cpu_devices", 1)
  jax.config.update("jax_disable_most_optimizations", True)
  if identity:
    address, index, count = identity
    join_processes(True, address, int(count), int(index), 300)
  run(folder, int(number), int(after), json.loads(sizes))
