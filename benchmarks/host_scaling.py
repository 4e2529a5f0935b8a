"""Measures the host's work in a run of 1, 2 and 4 processes: feed, checkpoints and metrics.

  python -m benchmarks.host_scaling [--folder DISK] [--size small] [--counts 1 2 4]

The processes form one run with four CPU devices in total. Each of them draws 128 sequences of 512/128
tokens for a batch (prepared text, span corruption), saves and restores its part of a T5 1.1 with
AdamW's state under FSDP, and writes summaries of metrics. Wall-clock time is that of process 0 between
two barriers. CPU seconds are those of all processes and threads: they show the cost of a process even
on a machine with fewer cores than processes.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

DEVICES = 4
LENGTHS = {"inputs": 512, "targets": 128}
ROWS = 128  # sequences that a process draws for a batch
SUMMARIES = 20
METRICS = 20


def write_text(folder: pathlib.Path, word_count: int) -> None:
  """Prepares random text: the speed of a feed does not depend on the content."""
  from rosetta_t5.data.prepared import prepare
  from rosetta_t5.data.vocabularies.sentencepiece_models import train_sentencepiece

  rng = np.random.default_rng(0)
  words = ["".join(rng.choice(list("abcdefghij"), 4)) for _ in range(500)]
  text = "\n".join(" ".join(rng.choice(words, 1000)) for _ in range(word_count // 1000))
  (folder / "text.txt").write_text(text)
  (folder / "pieces.model").write_bytes(train_sentencepiece([" ".join(words)] * 20, vocab_size=300))
  prepare(str(folder / "text.txt"), str(folder / "pieces.model"), folder / "tokens")


def time_on_all_processes(action: Callable[[], object]) -> dict[str, float]:
  """Runs an action on all processes; returns wall-clock seconds and the sum of CPU seconds."""
  import jax
  from jax.experimental import multihost_utils

  multihost_utils.sync_global_devices("begin")
  wall, cpu = time.perf_counter(), time.process_time()
  jax.block_until_ready(action())
  cpu = time.process_time() - cpu
  multihost_utils.sync_global_devices("end")
  wall = time.perf_counter() - wall
  cpus = multihost_utils.process_allgather(np.float32(cpu))
  return {"wall": wall, "cpu": float(np.sum(cpus))}


def time_feed(partitioner: Any, folder: pathlib.Path, count: int, batches: int) -> dict[str, float]:
  """Draws batches onto the devices; returns sequences per second."""
  from rosetta_t5 import data

  layout = partitioner.get_data_layout(ROWS * count)
  task = data.prepared_task(str(folder / "tokens"))
  cfg = data.DatasetConfig(task, LENGTHS, "train", ROWS * count, shuffle=True, seed=0)
  dataset = data.get_dataset(cfg, layout.shard_id, layout.num_shards, None)
  feed = data.prepare_train_iter(
    dataset, partitioner=partitioner, checkpoint_cfg=None, data_layout=layout
  )
  for _ in range(3):
    next(feed)
  seconds = time_on_all_processes(lambda: [next(feed) for _ in range(batches)])
  feed.close()
  return {clock: ROWS * count * batches / elapsed for clock, elapsed in seconds.items()}


def time_checkpoint(
  partitioner: Any, folder: pathlib.Path, size: str
) -> dict[str, dict[str, float]]:
  """Saves and restores twice each; the first time, which creates threads and folders, is not counted."""
  from benchmarks.checkpoint import make_state
  from rosetta_t5.checkpoints import OrbaxCheckpointManagerInterface

  initializer, state = make_state(size, partitioner)
  manager = OrbaxCheckpointManagerInterface(
    folder / "run", initializer.global_train_state_shape, partitioner, keep=1
  )

  def save(step: int) -> dict[str, float]:
    new_state = state.replace(step=state.step + step)
    return time_on_all_processes(lambda: (manager.save(new_state), manager.wait_until_finished()))

  _, saved = (save(step) for step in (0, 1))
  _, restored = (time_on_all_processes(manager.restore) for _ in range(2))
  manager.close()
  return {"save": saved, "restore": restored}


def time_metrics(partitioner: Any, folder: pathlib.Path) -> dict[str, float]:
  """Computes and writes summaries, as a run does at each stats_period; returns the seconds for one."""
  import jax
  import jax.numpy as jnp
  from jax.sharding import NamedSharding, PartitionSpec

  from rosetta_t5.telemetry.metrics import AveragePerStep
  from rosetta_t5.telemetry.metrics_manager import MetricsManager

  everywhere = NamedSharding(partitioner.mesh, PartitionSpec())
  make = jax.jit(
    lambda x: {f"metric_{i}": AveragePerStep.from_model_output(x + i) for i in range(METRICS)},
    out_shardings=everywhere,
  )
  manager = MetricsManager("train", folder / "metrics")

  def summarize(step: int) -> object:
    return manager.write_metrics_summary(make(jnp.float32(step)), step, 1).result()

  summarize(0)  # Creates the writer.
  seconds = time_on_all_processes(lambda: [summarize(step) for step in range(1, SUMMARIES + 1)])
  manager.close()
  return {clock: elapsed / SUMMARIES for clock, elapsed in seconds.items()}


def run_process(
  folder: pathlib.Path, size: str, batches: int, address: str, count: int, index: int
) -> None:
  """Runs one of the processes; process 0 prints the results."""
  import jax

  from rosetta_t5.data.tensorflow_import import import_tensorflow
  from rosetta_t5.distributed.coordination import join_processes
  from rosetta_t5.parallel import PjitPartitioner
  from rosetta_t5.parallel.process_settings import keep_freed_memory

  logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax logs how long it waits for a save.
  import_tensorflow()  # TensorBoard's writer needs it; this mutes its startup messages.
  keep_freed_memory()  # as the `rosetta-t5` command does
  jax.config.update("jax_num_cpu_devices", DEVICES // count)
  if count > 1:
    join_processes(True, address, count, index)
  partitioner = PjitPartitioner(mesh={"fsdp": DEVICES})
  result = {
    "feed": time_feed(partitioner, folder, count, batches),
    **time_checkpoint(partitioner, folder / str(count), size),
    "summary": time_metrics(partitioner, folder / str(count)),
  }
  if index == 0:
    print(json.dumps(result))


def measure(
  folder: pathlib.Path, size: str, batches: int, count: int
) -> dict[str, dict[str, float]]:
  """Starts `count` processes and returns the results of process 0."""
  with socket.socket() as free:
    free.bind(("localhost", 0))
    address = f"localhost:{free.getsockname()[1]}"
  command = (sys.executable, "-m", "benchmarks.host_scaling", "--size", size)
  command += ("--batches", str(batches))
  started = [
    subprocess.Popen(
      [*command, "--worker", str(folder), address, str(count), str(index)],
      stdout=subprocess.PIPE,
      text=True,
      env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    for index in range(count)
  ]
  outputs = [process.communicate()[0] for process in started]
  if failed := [process.returncode for process in started if process.returncode]:
    raise SystemExit(f"error: {len(failed)} of {count} processes failed")
  result: dict[str, dict[str, float]] = json.loads(outputs[0].splitlines()[-1])
  return result


def row(count: int, result: dict[str, dict[str, float]]) -> str:
  """Returns a row of the table."""
  feed, save, restore, summary = (result[n] for n in ("feed", "save", "restore", "summary"))
  cells = [f"{feed['wall']:,.0f} | {feed['cpu']:,.0f}"]
  cells += [f"{part['wall']:.2f} s | {part['cpu']:.2f} s" for part in (save, restore)]
  cells += [f"{1000 * summary['wall']:.1f} ms | {1000 * summary['cpu']:.1f} ms"]
  return f"| {count} | {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the benchmark and prints a table."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--size", default="small", help="size of the model that is saved")
  parser.add_argument("--folder", type=pathlib.Path, help="the disk; default: a temporary folder")
  parser.add_argument("--counts", type=int, nargs="+", choices=(1, 2, 4), default=(1, 2, 4))
  parser.add_argument("--batches", type=int, default=40, help="batches that are timed")
  parser.add_argument("--words", type=int, default=400_000, help="length of the prepared text")
  parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
  args = parser.parse_args(argv)
  if args.worker:
    folder, address, count, index = args.worker
    run_process(pathlib.Path(folder), args.size, args.batches, address, int(count), int(index))
    return
  folder = pathlib.Path(tempfile.mkdtemp(dir=args.folder))
  try:
    write_text(folder, args.words)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, T5 1.1 {args.size}\n")
    print("| processes | sequences/s | per CPU s | save | CPU | restore | CPU | summary | CPU |")
    print("|" + " --- |" * 9)
    for count in args.counts:
      print(row(count, measure(folder, args.size, args.batches, count)), flush=True)
      shutil.rmtree(folder / str(count))
  finally:
    shutil.rmtree(folder)


if __name__ == "__main__":
  main()
