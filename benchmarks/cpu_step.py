"""Times one training step of T5 1.1 on this machine's CPU, and of Hugging Face's T5 if it is installed.

  python -m benchmarks.cpu_step                    # ours, AdamW, batch 8, 512/128 tokens, float32
  python -m benchmarks.cpu_step --beside-hf        # and Hugging Face's on PyTorch, in turns
  python -m benchmarks.cpu_step --optimizer adamw muon --batch 48

All implementations do the same work on the same batch: forward pass, backward pass and an optimizer step,
without dropout; Hugging Face's optimizer is AdamW. Each runs in a process of its own, and they take turns.
The result is the median over the steps. PyTorch's step is timed eagerly and compiled.
"""

import argparse
import functools
import statistics
from collections.abc import Callable, Sequence

import jax
import optax

from benchmarks.hugging_face import hugging_face_step
from benchmarks.turns import Run, time_in_turns
from rosetta_t5.cli.bench import add_arguments, compile_step
from rosetta_t5.parallel.process_settings import keep_freed_memory
from rosetta_t5.training.optimizers.adafactor import Adafactor
from rosetta_t5.training.optimizers.optax_wrapper import OptaxWrapper, chain
from rosetta_t5.training.optimizers.transformations import muon

OPTIMIZERS = {
  "adamw": lambda: OptaxWrapper(optax.adamw(1e-4, weight_decay=0.01)),
  "adafactor": lambda: Adafactor(decay_rate=0.8, step_offset=0),
  "muon": lambda: chain([muon]),
}


def our_step(args: argparse.Namespace, optimizer: str) -> Callable[[], float]:
  """Returns a function that makes one step and returns the loss."""
  keep_freed_memory()  # as `python -m t5x.train` does
  compiled = compile_step(args, OPTIMIZERS[optimizer]())
  rng = jax.random.PRNGKey(1)
  state = compiled.state

  def run() -> float:
    nonlocal state
    state, metrics = compiled.step(state, compiled.batch, rng)
    jax.block_until_ready(state.params)
    return float(metrics["loss_per_nonpadding_target_token"].compute())

  return run


def main(argv: Sequence[str] | None = None) -> None:
  """Times the implementations in turns and prints one line for each; ours is the last."""
  parser = argparse.ArgumentParser("benchmarks/cpu_step.py", description=__doc__)
  add_arguments(parser, steps=5)
  parser.set_defaults(batch=8, dtype="float32")
  parser.add_argument("--optimizer", choices=OPTIMIZERS, nargs="+", default=["adamw"])
  parser.add_argument("--beside-hf", action="store_true", help="time transformers' T5 as well")
  args = parser.parse_args(argv)

  makers: dict[str, Callable[[], Run]] = {}
  if args.beside_hf:
    makers["Hugging Face eager"] = functools.partial(hugging_face_step, args, compiled=False)
    makers["Hugging Face compiled"] = functools.partial(hugging_face_step, args, compiled=True)
  ours = f"train step {args.size} {args.dtype} {args.batch}x{args.lengths[0]}/{args.lengths[1]}"
  for optimizer in args.optimizer:
    makers[f"{ours} {optimizer}"] = functools.partial(our_step, args, optimizer)
  for name, runs in time_in_turns(makers, args.steps).items():
    seconds = statistics.median(run.seconds for run in runs)
    cpu_seconds = statistics.median(run.cpu_seconds for run in runs)
    rate = args.batch / seconds
    print(f"{name}: {seconds:.2f} s, {rate:.2f} seq/s, {cpu_seconds:.2f} CPU seconds", flush=True)


if __name__ == "__main__":
  main()
