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
import functools
import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rosetta_t5.models import EncoderDecoderModel
from rosetta_t5.networks.t5 import T5Config, Transformer
from rosetta_t5.parallel import PjitPartitioner, keep_freed_memory
from rosetta_t5.training import TrainState, train_step
from rosetta_t5.training.optimizers import OptaxWrapper
from rosetta_t5.training.optimizers.adafactor import Adafactor

VOCAB_SIZE = 32128
SIZES = {  # emb_dim, num_heads, layers of encoder and of decoder, mlp_dim
  "tiny": (64, 2, 2, 128),
  "small": (512, 6, 8, 1024),
  "base": (768, 12, 12, 2048),
}
OPTIMIZERS = {
  "adamw": lambda: OptaxWrapper(optax.adamw(1e-4, weight_decay=0.01)),
  "adafactor": lambda: Adafactor(decay_rate=0.8, step_offset=0),
}


def make_batch(batch_size: int, encoder_length: int, decoder_length: int) -> dict[str, np.ndarray]:
  """Returns tokens drawn at random, without padding."""
  draw = np.random.default_rng(0).integers
  targets = draw(2, 32000, (batch_size, decoder_length), dtype=np.int32)
  return {
    "encoder_input_tokens": draw(2, 32000, (batch_size, encoder_length), dtype=np.int32),
    "decoder_target_tokens": targets,
    "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
    "decoder_loss_weights": np.ones_like(targets),
  }


def our_step(
  size: str, batch: dict[str, np.ndarray], optimizer: str, dtype: str
) -> Callable[[], float]:
  """Returns a function that makes one step and returns the loss."""
  keep_freed_memory()  # as `python -m t5x.train` does
  emb_dim, heads, layers, mlp_dim = SIZES[size]
  config = T5Config(
    vocab_size=VOCAB_SIZE,
    dtype=dtype,
    emb_dim=emb_dim,
    num_heads=heads,
    num_encoder_layers=layers,
    num_decoder_layers=layers,
    mlp_dim=mlp_dim,
    mlp_activations=("gelu", "linear"),
    dropout_rate=0.0,
  )
  optimizer_def = OPTIMIZERS[optimizer]()
  model = EncoderDecoderModel(Transformer(config), None, None, optimizer_def, z_loss=1e-4)
  partitioner = PjitPartitioner(num_partitions=1)
  shapes = {name: value.shape for name, value in batch.items()}

  def init(rng: jax.Array) -> TrainState:
    return TrainState.create(optimizer_def, model.get_initial_variables(rng, shapes))

  axes = partitioner.get_mesh_axes(jax.eval_shape(init, jax.random.PRNGKey(0)))
  state = partitioner.partition(init, None, axes)(jax.random.PRNGKey(0))
  step = partitioner.partition(
    functools.partial(
      train_step, loss_fn=model.loss_fn, learning_rate_fn=lambda _: jnp.float32(1e-3)
    ),
    (axes, partitioner.data_partition_spec, None),
    (axes, None),
    donate_argnums=(0,),
  )
  rng = jax.random.PRNGKey(1)
  holder = [state]

  def run() -> float:
    holder[0], metrics = step(holder[0], batch, rng)
    jax.block_until_ready(holder[0].params)
    return float(metrics["loss_per_nonpadding_target_token"].compute())

  return run


def hugging_face_step(
  size: str, batch: dict[str, np.ndarray], compiled: bool
) -> Callable[[], float]:
  """Returns the same step by transformers' T5ForConditionalGeneration and torch's AdamW."""
  import torch
  import transformers

  emb_dim, heads, layers, mlp_dim = SIZES[size]
  config = transformers.T5Config(
    vocab_size=VOCAB_SIZE,
    d_model=emb_dim,
    d_kv=64,
    d_ff=mlp_dim,
    num_layers=layers,
    num_heads=heads,
    feed_forward_proj="gated-gelu",
    tie_word_embeddings=False,
    dropout_rate=0.0,
    decoder_start_token_id=0,
    use_cache=False,
  )
  module = transformers.T5ForConditionalGeneration(config)
  optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, weight_decay=0.01)
  forward = torch.compile(module) if compiled else module
  inputs = torch.from_numpy(batch["encoder_input_tokens"]).long()
  labels = torch.from_numpy(batch["decoder_target_tokens"]).long()

  def run() -> float:
    optimizer.zero_grad(set_to_none=True)
    loss = forward(input_ids=inputs, labels=labels).loss
    loss.backward()
    optimizer.step()
    return float(loss.detach())

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
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--size", choices=SIZES, default="small")
  parser.add_argument("--batch-size", type=int, default=8)
  parser.add_argument("--lengths", type=int, nargs=2, default=(512, 128), metavar=("ENC", "DEC"))
  parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
  parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
  parser.add_argument("--steps", type=int, default=5, help="timed steps of each side")
  parser.add_argument("--beside-hf", action="store_true", help="time transformers' T5 as well")
  args = parser.parse_args()
  if args.steps < 1 or args.batch_size < 1 or min(args.lengths) < 1:
    parser.error("--steps, --batch-size and --lengths take positive numbers")

  batch = make_batch(args.batch_size, *args.lengths)
  sides: dict[str, tuple[Callable[..., Callable[[], float]], tuple]] = {}
  if args.beside_hf:
    sides["Hugging Face eager"] = (hugging_face_step, (args.size, batch, False))
    sides["Hugging Face compiled"] = (hugging_face_step, (args.size, batch, True))
  ours = (
    f"train step {args.size} {args.dtype} {args.batch_size}x{args.lengths[0]}/{args.lengths[1]}"
  )
  sides[ours] = (our_step, (args.size, batch, args.optimizer, args.dtype))

  workers = {name: Worker(make_step, arguments) for name, (make_step, arguments) in sides.items()}
  seconds: dict[str, list[float]] = {name: [] for name in workers}
  for _ in range(args.steps):
    for name, worker in workers.items():
      seconds[name].append(worker.time_step())
  for name, times in seconds.items():
    workers[name].close()
    median = statistics.median(times)
    print(f"{name}: {median:.2f} s, {args.batch_size / median:.2f} seq/s", flush=True)


if __name__ == "__main__":
  main()
