"""One of several processes that read the same data together, for test_hosts.py.

  host_feed.py FOLDER TASK PORT PROCESSES INDEX FROM TO

TASK is a prepared folder, or a pattern of files. The process draws the batches FROM up to TO, which
it restores from FOLDER if FROM is not 0, writes its rows of each, and saves its position at the end.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import jax
import numpy as np

DEVICES = 4
LENGTHS = {"inputs": 32, "targets": 16}


def main(folder: pathlib.Path, task: str, port: str, processes: int, index: int) -> None:
  jax.config.update("jax_num_cpu_devices", DEVICES // processes)
  if processes > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=processes, process_id=index)
  from rosetta_t5 import data
  from rosetta_t5.checkpoints.saved_items import (
    DatasetArgs,
    DatasetCheckpointHandler,
    dataset_filename,
  )
  from rosetta_t5.parallel.partitioner import PjitPartitioner

  first, last = int(sys.argv[6]), int(sys.argv[7])
  partitioner = PjitPartitioner(num_partitions=1)
  layout = partitioner.get_data_layout(8)
  name, converter = _task(task)
  cfg = data.DatasetConfig(name, LENGTHS, "train", 8, shuffle=True, seed=5)
  feed = data.prepare_train_iter(
    data.get_dataset(cfg, layout.shard_id, layout.num_shards, converter),
    partitioner=partitioner,
    checkpoint_cfg=None,
    data_layout=layout,
  )
  handler = DatasetCheckpointHandler(dataset_filename(layout.shard_id, layout.num_shards))
  if first:
    handler.restore(folder / str(first), DatasetArgs(feed))  # type: ignore[arg-type]
  for step in range(first, last):
    np.savez(folder / f"{step}-{index}.npz", **_rows(next(feed)))
  (folder / str(last)).mkdir(exist_ok=True)
  handler.save(folder / str(last), DatasetArgs(feed))  # type: ignore[arg-type]
  feed.close()


def _task(task: str) -> tuple[Any, Any]:
  from rosetta_t5 import data

  if pathlib.Path(task).is_dir():
    return data.prepared_task(task), None
  import seqio

  vocabulary = seqio.ByteVocabulary()
  return data.file_task(task, vocabulary=vocabulary), seqio.EncDecFeatureConverter


def _rows(batch: Any) -> dict[str, np.ndarray]:
  """This process's rows of each feature, in order."""
  return {
    name: np.concatenate(
      [
        np.asarray(shard.data)
        for shard in sorted(array.addressable_shards, key=lambda s: s.index[0].start or 0)
      ]
    )
    for name, array in batch.items()
  }


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
