"""Evaluates CHECKPOINT, as one of several processes if PORT and more are given.

Usage: python one_of_several.py CHECKPOINT OUTPUT_DIR [PORT COUNT INDEX]
"""

from __future__ import annotations

import sys

import jax
import numpy as np

TASK = "pairs_of_several_processes"


def likelihood(targets, scores):
  """Returns how many examples there are, and their mean score."""
  return {"examples": len(targets), "likelihood": float(np.mean(scores))}


def exactness(targets, predictions):
  """Returns how many predictions there are, and how long they are."""
  return {"predictions": len(predictions), "length": float(np.mean([len(p) for p in predictions]))}


def main(checkpoint, output_dir):
  """Evaluates it."""
  from tiny_tasks import add_task, byte_model

  from rosetta_t5 import checkpoints, data
  from rosetta_t5.eval import evaluate
  from rosetta_t5.parallel import PjitPartitioner

  add_task(TASK, metric_fns=[likelihood, exactness])
  evaluate(
    model=byte_model(),
    dataset_cfg=data.DatasetConfig(TASK, None, "test", batch_size=8, shuffle=False, seed=0),
    restore_checkpoint_cfg=checkpoints.RestoreCheckpointConfig(checkpoint, mode="specific"),
    partitioner=PjitPartitioner(num_partitions=1),
    output_dir=output_dir,
    summarize_config_fn=lambda model_dir, summary_writer, step: None,
  )


if __name__ == "__main__":
  checkpoint, output_dir, *group = sys.argv[1:]
  if group:
    port, count, index = map(int, group)
    jax.distributed.initialize(f"localhost:{port}", num_processes=count, process_id=index)
    assert jax.process_count() == count
  main(checkpoint, output_dir)
