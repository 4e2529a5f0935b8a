"""Saves a checkpoint at each step until a test kills it: saver_process.py FOLDER LAYOUT.

Every array of step N is filled with N, so the test notices a checkpoint that mixes two steps.
"""

from __future__ import annotations

import pathlib
import sys

import jax
import jax.numpy as jnp

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from tiny_state import Counter, Setup, Tiny

WIDTH = 100_000


def main(folder: pathlib.Path) -> None:
  setup = Setup(module=Tiny(width=WIDTH), num_partitions=1)
  counter = Counter()
  manager = setup.manager(folder, dataset_iterator=counter, keep=3)
  step = counter.position = manager.latest_step() or 0
  state = setup.state()
  while True:
    step = next(counter)
    filled = jax.tree.map(lambda x, n=step: jnp.full_like(x, n), state)
    print("saving", step, flush=True)
    manager.save(filled)


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
