"""Times one training step of T5 1.1 on this machine's CPU, beside Hugging Face's T5 if it is installed.

  python benchmarks/cpu_step.py                    # ours, AdamW, batch 8, 512/128 tokens, float32
  python benchmarks/cpu_step.py --beside-hf        # and Hugging Face's on PyTorch, in turns
  python benchmarks/cpu_step.py --optimizer adafactor

Both sides do the same work: forward, backward and AdamW's update of all parameters, no dropout, the
same batch each time. Each side has a process of its own, and they take turns, so that a change in the
machine's speed meets all of them. A side's time is the median over its steps. PyTorch's step is timed
eagerly and compiled.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import optax

from rosetta_t5.bench.hugging_face import hugging_face_step
from rosetta_t5.bench.train_step import add_switches, compile_step
from rosetta_t5.bench.workload import argument_parser
from rosetta_t5.parallel import keep_freed_memory
from rosetta_t5.training.optimizers import OptaxWrapper
from rosetta_t5.training.optimizers.adafactor import Adafactor

OPTIMIZERS = {
  "adamw": lambda: OptaxWrapper(optax.adamw(1e-4, weight_decay=0.01)),
  "adafactor": lambda: Adafactor(decay_rate=0.8, step_offset=0),
}


def our_step(args: argparse.Namespace) -> Callable[[], float]:
  """Returns a function that makes one step and returns the loss."""
  keep_freed_memory()  # as `python -m t5x.train` does
  step, state, batch, _ = compile_step(args, OPTIMIZERS[args.optimizer]())
  rng = jax.random.PRNGKey(1)
  holder = [state]

  def run() -> float:
    holder[0], metrics = step(holder[0], batch, rng)
    jax.block_until_ready(holder[0].params)
    return float(metrics["loss_per_nonpadding_target_token"].compute())

  return run


class Worker:
  """A process of its own for one side, so that no side has the other's threads or memory about it."""

  def __init__(self, make_step: Callable[..., Callable[[], float]], arguments: tuple):
    """Starts the process and makes two steps, of which the first compiles."""
    context = multiprocessing.get_context("spawn")
    self._pipe, theirs = context.Pipe()
    self._process = context.Process(target=_serve, args=(make_step, arguments, theirs), daemon=True)
    self._process.start()
    for _ in range(2):
      self.time_step()

  def time_step(self) -> float:
    """Returns the seconds that one step takes."""
    self._pipe.send(True)
    return self._pipe.recv()

  def last_result(self) -> Any:
    """Returns what the last step returned."""
    self._pipe.send("result")
    return self._pipe.recv()

  def close(self) -> None:
    """Ends the process."""
    self._pipe.send(False)
    self._process.join()


def _serve(make_step: Callable[..., Callable[[], float]], arguments: tuple, pipe: Any) -> None:
  run = make_step(*arguments)
  result = None
  while request := pipe.recv():
    if request == "result":
      pipe.send(result)
      continue
    started = time.perf_counter()
    result = run()
    pipe.send(time.perf_counter() - started)


def main() -> None:
  """Times the sides in turns and prints a line each; ours is the last."""
  parser = argument_parser("benchmarks/cpu_step.py", __doc__ or "", steps=5)
  parser.set_defaults(batch=8, dtype="float32", fp8=False)
  parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
  parser.add_argument("--beside-hf", action="store_true", help="time transformers' T5 as well")
  add_switches(parser)
  args = parser.parse_args()

  sides: dict[str, tuple[Callable[..., Callable[[], Any]], tuple]] = {}
  if args.beside_hf:
    sides["Hugging Face eager"] = (hugging_face_step, (args, False))
    sides["Hugging Face compiled"] = (hugging_face_step, (args, True))
  ours = f"train step {args.size} {args.dtype} {args.batch}x{args.lengths[0]}/{args.lengths[1]}"
  sides[ours] = (our_step, (args,))

  workers = {name: Worker(make_step, arguments) for name, (make_step, arguments) in sides.items()}
  seconds: dict[str, list[float]] = {name: [] for name in workers}
  for _ in range(args.steps):
    for name, worker in workers.items():
      seconds[name].append(worker.time_step())
  for name, times in seconds.items():
    workers[name].close()
    median = statistics.median(times)
    print(f"{name}: {median:.2f} s, {args.batch / median:.2f} seq/s", flush=True)


if __name__ == "__main__":
  main()
