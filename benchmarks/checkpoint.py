"""Times saving and restoring T5 1.1 with AdamW's state: 0.9 GB for the size small.

  python -m benchmarks.checkpoint --folder runs/benchmark     # on the disk to be measured
  python -m benchmarks.checkpoint --checksums                 # also with and without checksums, in turns

A save blocks the training loop until `save` returns; a synchronous one would block it until everything
is on disk. Between saves the state is updated in place, as by a training step. A restore ends when the
whole state is on the devices. It is compared with reading the checkpoint's files one after another into
a buffer of 64 MB. Both are timed with the files in the page cache and without (posix_fadvise drops
them). The host of a virtual disk may still cache them.
"""

import argparse
import collections
import contextlib
import gc
import os
import pathlib
import shutil
import statistics
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rosetta_t5 import files
from rosetta_t5.checkpoints import OrbaxCheckpointManagerInterface, TrainStateInitializer, manager
from rosetta_t5.cli.bench import SIZES, model_config
from rosetta_t5.models import EncoderDecoderModel
from rosetta_t5.networks.transformer import Transformer
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.parallel.process_settings import keep_freed_memory
from rosetta_t5.training import TrainState
from rosetta_t5.training.optimizers.optax_wrapper import adamw

_BUFFER = 64 << 20
# The first save is not timed: it creates threads and folders.
_WARMUP = 1


def measure_seconds(action: Callable[[], object]) -> float:
  started = time.perf_counter()
  jax.block_until_ready(action())
  return time.perf_counter() - started


def make_state(size: str, partitioner: PjitPartitioner) -> tuple[TrainStateInitializer, TrainState]:
  """Returns a state of random numbers. Moments of zeros, as in a new run, would compress well."""
  vocabulary = types.SimpleNamespace(eos_id=1)
  model = EncoderDecoderModel(
    Transformer(model_config(size)), vocabulary, vocabulary, adamw(learning_rate=1e-3)
  )
  shapes = {"encoder_input_tokens": (1, 8), "decoder_input_tokens": (1, 8)}
  initializer = TrainStateInitializer(
    model.optimizer_def, model.get_initial_variables, shapes, partitioner
  )
  rng = np.random.default_rng(0)

  def draw(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.Array:
    def part(index: tuple[slice, ...]) -> np.ndarray:
      shape = [len(range(*at.indices(size))) for at, size in zip(index, leaf.shape, strict=True)]
      return np.asarray(rng.standard_normal(shape, np.float32) if shape else 0, leaf.dtype)

    return jax.make_array_from_callback(leaf.shape, NamedSharding(partitioner.mesh, spec), part)

  return initializer, jax.tree.map(
    draw, initializer.global_train_state_shape, initializer.train_state_axes
  )


def checkpoint_files(folder: pathlib.Path) -> list[pathlib.Path]:
  # Files of a checkpoint that is being deleted have another prefix.
  return [path for path in sorted(folder.glob("checkpoint_*/**/*")) if path.is_file()]


def read_bytes(folder: pathlib.Path) -> None:
  buffer = bytearray(_BUFFER)
  for path in checkpoint_files(folder):
    with open(path, "rb", buffering=0) as file:
      while file.readinto(buffer):
        pass


def drop_from_memory(folder: pathlib.Path) -> None:
  os.sync()
  for path in checkpoint_files(folder):
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def measure_saves(
  manager: OrbaxCheckpointManagerInterface, state: TrainState, repeats: int
) -> tuple[list[float], list[float]]:
  """Returns the seconds for which saves blocked, and the seconds until everything was on disk."""
  next_step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
  blocked, complete = [], []
  for _ in range(_WARMUP + repeats):
    state = jax.block_until_ready(next_step(state))
    os.sync()
    started = time.perf_counter()
    manager.save(state)
    blocked.append(time.perf_counter() - started)
    manager.wait_until_finished()
    complete.append(time.perf_counter() - started)
  return blocked[_WARMUP:], complete[_WARMUP:]


def measure_restores(
  manager: OrbaxCheckpointManagerInterface, folder: pathlib.Path, repeats: int, cached: bool
) -> tuple[list[float], list[float]]:
  """Returns the seconds that reading the files and restoring took, measured in turns."""
  read: list[float] = []
  restored: list[float] = []
  for _ in range(_WARMUP + repeats):
    for action, times in ((lambda: read_bytes(folder), read), (manager.restore, restored)):
      if not cached:
        drop_from_memory(folder)
      times.append(measure_seconds(action))
  return read[_WARMUP:], restored[_WARMUP:]


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
  """Inside the `with`, saves write no checksums of their files and restores verify none."""
  with (
    mock.patch.object(manager, "write_checksums"),
    mock.patch.object(files, "verify_checksums", return_value=True),
  ):
    yield


def measure_checksums(
  manager: OrbaxCheckpointManagerInterface, state: TrainState, folder: pathlib.Path, repeats: int
) -> None:
  """Prints what checksums cost: a row of seconds and of seconds of all cores for each operation."""
  times: dict[tuple[str, str], list[tuple[float, float]]] = collections.defaultdict(list)

  def measure(name: str, has_checksums: bool, action: Callable[[], object]) -> None:
    cpu = time.process_time()
    with contextlib.nullcontext() if has_checksums else without_checksums():
      seconds = measure_seconds(action)
    times[name, str(has_checksums)].append((seconds, time.process_time() - cpu))

  def save() -> None:
    manager.save(state)
    manager.wait_until_finished()

  # In the order A B B A, so that neither always comes first. The last save has checksums.
  turns = [False, True, True, False] * ((_WARMUP + repeats) // 2) + [False, True]
  next_step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
  for has_checksums in turns:
    state = jax.block_until_ready(next_step(state))
    os.sync()
    measure("save", has_checksums, save)
  for cached in (False, True):
    for has_checksums in turns:
      if not cached:
        drop_from_memory(folder)
      measure(f"restore from {'memory' if cached else 'disk'}", has_checksums, manager.restore)
  for name in dict.fromkeys(name for name, _ in times):
    for kind, measure_of in (("", 0), (", seconds of all cores", 1)):
      pair = ([t[measure_of] for t in times[name, key][_WARMUP:]] for key in ("True", "False"))
      print(row(name + kind, *pair, "< 1.03" if name == "save" else "< 1.05"))


def row(name: str, times: list[float], compared: list[float], goal: str) -> str:
  ratio = statistics.median(times) / statistics.median(compared)
  cells = [f"{statistics.median(x):.2f} ({min(x):.2f} to {max(x):.2f})" for x in (times, compared)]
  return f"| {name} | {' | '.join(cells)} | {ratio:.2f} | {goal} |"


def main(argv: Sequence[str] | None = None) -> None:
  """Measures saves and restores and prints a table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--size", choices=SIZES, default="small")
  parser.add_argument("--folder", type=pathlib.Path, help="default: a temporary one")
  parser.add_argument("--repeats", type=int, default=5)
  parser.add_argument("--checksums", action="store_true", help="also measure what checksums cost")
  args = parser.parse_args(argv)
  # As the `rosetta-t5` command does. Python's garbage collector would take 0.1 s at random moments.
  keep_freed_memory()
  gc.set_threshold(50_000, 20, 100)
  folder = pathlib.Path(tempfile.mkdtemp(dir=args.folder))
  try:
    partitioner = PjitPartitioner(num_partitions=1)
    initializer, state = make_state(args.size, partitioner)
    gigabytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 1e9
    print(f"T5 1.1 {args.size} with AdamW's state, {gigabytes:.2f} GB, seconds: median (range)\n")
    manager = OrbaxCheckpointManagerInterface(
      folder, initializer.global_train_state_shape, partitioner, keep=1
    )
    print("| | time | compared with | ratio | goal |\n| --- | --- | --- | --- | --- |")
    saves = measure_saves(manager, state, args.repeats)
    del state
    print(row("save: blocks the loop, compared with a synchronous save", *saves, "< 0.10"))
    for cached in (False, True):
      read, restored = measure_restores(manager, folder, args.repeats, cached)
      where = "memory" if cached else "disk"
      print(row(f"restore from {where}, compared with reading the bytes", restored, read, "< 1.5"))
    if args.checksums:
      measure_checksums(manager, manager.restore(), folder, args.repeats)
    manager.close()
  finally:
    shutil.rmtree(folder)


if __name__ == "__main__":
  main()
