"""Trains in processes that a test can kill: killable_run.py CACHE_FOLDER.

Each line "MODEL_DIR STEPS PERIOD SIGTERM_AFTER" on standard input forks a process that trains there with
the real run page, saves every PERIOD steps, and sends itself a SIGTERM after a step unless that is 0. It
prints "pid N" first, "step N LOSS" after each step, and "ended STATUS" at the end. The packages are
imported once, by the parent process, which computes nothing itself.
"""

from __future__ import annotations

import functools
import os
import pathlib
import signal
import sys
from collections.abc import Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.partitioning import param_with_axes

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import tiny_models

from rosetta_t5 import checkpoints, data
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.train import train
from rosetta_t5.training import Trainer
from rosetta_t5.training.actions import ActionMode, BaseAction

BATCH = 4


class Network(nn.Module):
  """A network that compiles quickly, has a megabyte of parameters, and uses dropout."""

  @nn.compact
  def __call__(self, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens, **options):
    init = nn.initializers.normal()
    shape = (tiny_models.VOCAB, 4096)
    x_BTD = param_with_axes("in", init, shape, axes=("vocab", "mlp"))[decoder_input_tokens]
    x_BTD = nn.Dropout(0.1, deterministic=not options["enable_dropout"])(x_BTD)
    return x_BTD @ param_with_axes("out", init, shape[::-1], axes=("mlp", "vocab"))


class PrintLoss(BaseAction):
  """Prints the exact loss of each step; sends a SIGTERM to this process after one of them."""

  def __init__(self, sigterm_after: int):
    self._sigterm_after = sigterm_after

  def run(self, train_state, metrics_by_task):
    step = int(train_state.step)
    print("step", step, float(metrics_by_task["train"]["loss"].value).hex(), flush=True)
    if step == self._sigterm_after:
      signal.raise_signal(signal.SIGTERM)
    return False


class Batches:
  """Endless random batches, the same in each run."""

  def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
    seed = 0
    while True:
      batch = tiny_models.make_batch(BATCH, seed=seed)
      yield {name: np.asarray(array) for name, array in batch.items()}
      seed += 1


class WithoutSummaries(Trainer):
  """A trainer that writes no TensorBoard files, for which it would import TensorFlow."""

  def __init__(self, *, summary_dir: str, **arguments):
    super().__init__(summary_dir=None, **arguments)


def run(
  model_dir: str, steps: int, period: int, sigterm_after: int, batch_size: int = BATCH, **others
) -> None:
  """Trains; `others` replace arguments of `train`."""
  arguments = {
    "model": tiny_models.make_model(Network()),
    "train_dataset_cfg": data.DatasetConfig("none", {}, "train", batch_size, shuffle=False, seed=0),
    "train_eval_dataset_cfg": None,
    "infer_eval_dataset_cfg": None,
    "checkpoint_cfg": checkpoint_config(period, save_dataset=True),
    "partitioner": PjitPartitioner(num_partitions=1),
    "trainer_cls": functools.partial(
      WithoutSummaries, learning_rate_fn=lambda step: jnp.float32(0.01), num_microbatches=None
    ),
    "model_dir": model_dir,
    "total_steps": steps,
    "eval_steps": 1,
    "eval_period": 1,
    "random_seed": 3,
    "summarize_config_fn": lambda model_dir, writer, step: None,
    "get_dataset_fn": lambda *arguments: Batches(),
    "verify_matching_vocabs_fn": None,
    "actions": {ActionMode.TRAIN: [PrintLoss(sigterm_after)]},
  }
  train(**arguments | others)


def checkpoint_config(period: int, save_dataset: bool) -> checkpoints.CheckpointConfig:
  return checkpoints.CheckpointConfig(
    save=checkpoints.SaveCheckpointConfig(period=period, keep=3, save_dataset=save_dataset)
  )


def main(cache: str) -> None:
  jax.config.update("jax_compilation_cache_dir", cache)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
  for line in sys.stdin:
    model_dir, *numbers = line.split()
    if pid := os.fork():
      print("pid", pid, flush=True)
      # A killed process may have printed an incomplete line.
      print("\nended", os.waitpid(pid, 0)[1], flush=True)
    else:
      try:
        run(model_dir, *map(int, numbers))
      except SystemExit as end:
        os._exit(end.code)
      os._exit(0)


if __name__ == "__main__":
  main(sys.argv[1])
