"""Infers over a task of pairs, slowly, so that a test can kill it: `python killed.py FOLDER CHECKPOINT`."""

from __future__ import annotations

import sys
import time

from tiny_tasks import add_task, byte_model

from rosetta_t5 import checkpoints, data
from rosetta_t5.infer import infer
from rosetta_t5.inference.result_files import write_inferences_to_file
from rosetta_t5.parallel import PjitPartitioner

TASK = "pairs_of_a_killed_run"
PAIRS = [(f"question {n}", f"answer {n * n}") for n in range(40)]


def slowly(path, *arguments):
  write_inferences_to_file(path, *arguments)
  print("written", path, flush=True)
  time.sleep(1.0)


def main(folder: str, checkpoint: str, write_fn=slowly) -> None:
  partitioner = PjitPartitioner(num_partitions=1)
  add_task(TASK, PAIRS)
  infer(
    mode="score",
    model=byte_model(),
    dataset_cfg=data.DatasetConfig(
      TASK, {"inputs": 16, "targets": 16}, split="test", batch_size=8, shuffle=False, seed=0
    ),
    restore_checkpoint_cfg=checkpoints.RestoreCheckpointConfig(checkpoint, mode="specific"),
    partitioner=partitioner,
    output_dir=f"{folder}/out",
    checkpoint_period=1,
    write_fn=write_fn,
    summarize_config_fn=lambda **_: None,
  )


if __name__ == "__main__":
  main(*sys.argv[1:])
