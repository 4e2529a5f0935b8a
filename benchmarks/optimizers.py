"""Compares the optimizers of gin/optimizers on a small T5 and a small GPT, with equal tokens.

  python benchmarks/optimizers.py --json out.json            # all optimizers, two models, three seeds
  python benchmarks/optimizers.py --only adamw muon --steps 100 --plot out.png

The models have the size of the quickstart (3.6 million parameters), the text is Python's documentation,
and all optimizers see the same batches in the same order. Each learning rate of the optimizer's grid is
tried with the first seed. The one with the lowest loss of held-out text is run with the other seeds, and
the results are the losses of other held-out text. The schedule is a linear warm-up and a cosine (without
the cosine for schedule-free). The other hyperparameters are those of the gin files, except AdEMAMix's b2
and b3, and Prodigy's weight decay. Seconds are the CPU time of the process, of all cores together, which
other programs on the machine hardly change; what an optimizer does in some steps only is included. Memory
is that of the optimizer's state.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rosetta_t5.data import quickstart_data
from rosetta_t5.models import DecoderOnlyModel, EncoderDecoderModel
from rosetta_t5.networks.transformer import DecoderWrapper, T5Config, Transformer, TransformerConfig
from rosetta_t5.training import TrainState, train_step
from rosetta_t5.training.optimizers import optax_wrapper
from rosetta_t5.training.optimizers.matrices import shampoo, soap
from rosetta_t5.training.optimizers.transformations import muon, precondition_by_kfac, sophia

contrib = optax.contrib
CLIP = optax.clip_by_global_norm(1.0)
# Name → the transformations, and the grid of learning rates.
OPTIMIZERS: dict[str, tuple[list[Any], tuple[float, ...]]] = {
  "adamw": ([CLIP, functools.partial(optax.adamw, b2=0.95, weight_decay=0.1)], (1e-3, 3e-3, 1e-2)),
  "lion": ([CLIP, functools.partial(optax.lion, weight_decay=0.5)], (3e-4, 1e-3, 3e-3)),
  "muon": ([CLIP, muon], (3e-3, 1e-2, 3e-2)),
  "sophia": ([functools.partial(sophia, weight_decay=0.2)], (1e-4, 3e-4, 1e-3, 3e-3)),
  "ademamix": (
    [CLIP, functools.partial(contrib.ademamix, b2=0.95, b3=0.99, weight_decay=0.1)],
    (3e-4, 1e-3, 3e-3, 1e-2),
  ),
  "schedule_free": (
    [CLIP, functools.partial(contrib.schedule_free_adamw, b1=0.95, b2=0.95, weight_decay=0.05)],
    (1e-3, 3e-3, 1e-2, 3e-2),
  ),
  "prodigy": (
    [CLIP, functools.partial(contrib.prodigy, betas=(0.9, 0.95), safeguard_warmup=True)],
    (0.3, 1.0, 3.0, 10.0),
  ),
  "soap": ([CLIP, soap], (1e-3, 3e-3, 1e-2)),
  "shampoo": ([CLIP, functools.partial(shampoo, weight_decay=0.1)], (1e-3, 3e-3, 1e-2, 3e-2)),
  "kfac": (
    [CLIP, precondition_by_kfac, functools.partial(optax.lamb, weight_decay=0.01)],
    (1e-2, 3e-2, 1e-1),
  ),
}
VOCABULARY = 4096
LENGTH = 64


def make_model(name: str, width: int) -> Any:
  """Returns the model `t5` or `gpt`, of the quickstart's size if `width` is 192."""
  sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "emb_dim": width, "num_heads": 3}
  sizes |= {
    "head_dim": width // 3,
    "mlp_dim": width * 8 // 3,
    "dropout_rate": 0.0,
    "dtype": "float32",
  }
  if name == "t5":
    layers = {"num_encoder_layers": 2, "num_decoder_layers": 2}
    config = T5Config(**sizes, **layers, mlp_activations=("gelu", "linear"))
    return EncoderDecoderModel(Transformer(config), None, None, None, z_loss=1e-4)
  config = TransformerConfig(
    **sizes, num_layers=4, mlp_activations=("gelu", "linear"), positions="rotary"
  )
  return DecoderOnlyModel(DecoderWrapper(config), None, None, z_loss=1e-4)


def read_tokens() -> np.ndarray:
  """Returns the ids of the documentation's text; text and vocabulary are made on first use."""
  import sentencepiece

  folder = quickstart_data.data_folder()
  quickstart_data.prepare(folder)
  pieces = sentencepiece.SentencePieceProcessor(str(folder / quickstart_data.VOCABULARY_FILE))
  lines = [line for path in sorted(folder.glob("train-*.txt")) for line in path.open()]
  return np.concatenate([[*ids, pieces.eos_id()] for ids in pieces.encode(lines)]).astype(np.int32)


def batches(
  name: str, tokens: np.ndarray, size: int, steps: int
) -> Iterator[dict[str, np.ndarray]]:
  """Yields the batches of both models: rows of text; T5 continues the first half of a row."""
  rng = np.random.default_rng(0)
  for _ in range(steps):
    starts = rng.integers(0, len(tokens) - LENGTH, size)
    rows = np.stack([tokens[start : start + LENGTH] for start in starts])
    targets = rows if name == "gpt" else rows[:, LENGTH // 2 :]
    batch = {
      "decoder_target_tokens": targets,
      "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
      "decoder_loss_weights": np.ones_like(targets),
    }
    yield batch if name == "gpt" else {"encoder_input_tokens": rows[:, : LENGTH // 2], **batch}


class Comparison:
  """One model with one optimizer, compiled once for all learning rates and seeds.

  Args:
    name: the model, `t5` or `gpt`.
    optimizer: a name of `OPTIMIZERS`.
    args: the command line.
    data: the training batches, then one to choose the learning rate by and one for the result.
  """

  def __init__(self, name: str, optimizer: str, args: argparse.Namespace, data: list[Any]):
    self.data, self.steps = data, args.steps
    model = make_model(name, args.width)
    self.definition = optax_wrapper.chain(OPTIMIZERS[optimizer][0])
    shapes = {feature: value.shape for feature, value in data[0].items()}
    warmup, decays = max(1, args.steps // 10), optimizer != "schedule_free"

    def schedule(step: jax.Array) -> jax.Array:
      rate = jnp.minimum(1.0, (step + 1) / warmup)
      return rate * (0.5 + 0.5 * jnp.cos(jnp.pi * step / args.steps)) if decays else rate

    def step(state: TrainState, batch: Any, peak: jax.Array) -> tuple[TrainState, jax.Array]:
      new_state, metrics = train_step(
        state,
        batch,
        jax.random.PRNGKey(0),
        loss_fn=model.loss_fn,
        learning_rate_fn=lambda step: peak * schedule(step),
      )
      return new_state, metrics["loss_per_all_target_tokens"].compute()

    def evaluate(state: TrainState, batch: Any) -> jax.Array:
      params = self.definition.params_to_evaluate(state.params, state.param_states)
      return model.loss_fn(params, batch, None)[0] / batch["decoder_loss_weights"].sum()

    self.init = jax.jit(
      lambda key: TrainState.create(self.definition, model.get_initial_variables(key, shapes))
    )
    state = jax.eval_shape(self.init, jax.random.PRNGKey(0))
    self.step = jax.jit(step, donate_argnums=0).lower(state, data[0], jnp.float32(0)).compile()
    self.evaluate = jax.jit(evaluate)
    sizes = [(leaf.size, leaf.dtype.itemsize) for leaf in jax.tree.leaves(state.param_states)]
    self.state_bytes = sum(size * width for size, width in sizes)
    self.parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))

  def run(self, peak: float, seed: int) -> dict[str, Any]:
    """Trains once, and returns the loss of each step and those of the two held-out batches."""
    state, losses = self.init(jax.random.PRNGKey(seed)), []
    jax.block_until_ready(state)
    started = time.process_time()
    for batch in self.data[: self.steps]:
      state, loss = self.step(state, batch, jnp.float32(peak))
      losses.append(loss)
    jax.block_until_ready(state)
    seconds = (time.process_time() - started) / self.steps
    validation, held_out = (float(self.evaluate(state, batch)) for batch in self.data[-2:])
    return {
      "peak": peak,
      "seed": seed,
      "losses": np.array(losses).tolist(),
      "validation": validation,
      "held_out": held_out,
      "seconds": seconds,
    }


def compare(name: str, optimizer: str, args: argparse.Namespace, data: Any) -> dict[str, Any]:
  """Returns the results of one optimizer: its runs, the best learning rate, time and memory."""
  comparison = Comparison(name, optimizer, args, data)
  runs = [comparison.run(peak, seed=0) for peak in OPTIMIZERS[optimizer][1]]
  best = min(runs, key=lambda run: np.nan_to_num(run["validation"], nan=np.inf))["peak"]
  runs += [comparison.run(best, seed) for seed in range(1, args.seeds)]
  return {
    "model": name,
    "optimizer": optimizer,
    "best": best,
    "runs": runs,
    "seconds": statistics.median(run["seconds"] for run in runs),
    "bytes_per_parameter": comparison.state_bytes / comparison.parameters,
  }


def table(results: list[dict[str, Any]]) -> str:
  """Returns the results as a table in Markdown: held-out loss, time and memory."""
  lines = [
    "| model | optimizer | grid | best | held-out loss, mean of seeds (range) | CPU seconds per step | bytes |",
    "| --- | --- | --- | --- | --- | --- | --- |",
  ]
  for row in results:
    losses = [run["held_out"] for run in row["runs"] if run["peak"] == row["best"]]
    grid = ", ".join(f"{peak:g}" for peak in OPTIMIZERS[row["optimizer"]][1])
    spread = f"{np.mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})"
    cells = (row["model"], row["optimizer"], grid, f"{row['best']:g}", spread)
    costs = (f"{row['seconds']:.3f}", f"{row['bytes_per_parameter']:.1f}")
    lines.append("| " + " | ".join(cells + costs) + " |")
  return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: str) -> None:
  """Writes a picture of the loss by step and by second, the mean of the seeds, for each model."""
  from matplotlib import pyplot

  pyplot.rcParams["svg.fonttype"] = "none"  # text instead of outlines of letters
  models = sorted({row["model"] for row in results})
  figure, axes = pyplot.subplots(len(models), 2, figsize=(11, 4 * len(models)), squeeze=False)
  for row in results:
    losses = [run["losses"] for run in row["runs"] if run["peak"] == row["best"]]
    width = max(1, len(losses[0]) // 20)
    smooth = np.convolve(np.mean(losses, axis=0), np.ones(width) / width, mode="valid")
    steps = np.arange(width, len(losses[0]) + 1)
    for axis, x in zip(
      axes[models.index(row["model"])], (steps, steps * row["seconds"]), strict=True
    ):
      axis.plot(x[::3], smooth[::3], label=row["optimizer"])
      axis.set_ylabel(f"{row['model']}: loss, nats per token")
      axis.set_xlabel("step" if x is steps else "CPU seconds")
  axes[-1, 0].legend(ncols=2)
  figure.tight_layout()
  figure.savefig(path, dpi=110)


def main() -> None:
  """Runs the comparison of the command line."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument("--only", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
  parser.add_argument("--models", nargs="+", choices=("t5", "gpt"), default=["t5", "gpt"])
  parser.add_argument("--steps", type=int, default=300, help="steps of a run (default: 300)")
  parser.add_argument("--batch", type=int, default=8, help="rows of a batch (default: 8)")
  parser.add_argument("--width", type=int, default=192, help="the models' width (default: 192)")
  parser.add_argument(
    "--seeds", type=int, default=3, help="runs at the best learning rate (default: 3)"
  )
  parser.add_argument("--json", type=pathlib.Path, help="the file for all results")
  parser.add_argument("--plot", help="the file for a picture; needs matplotlib")
  args = parser.parse_args()
  tokens = read_tokens()
  results = []
  for name in args.models:
    training, held_out = np.split(tokens, [len(tokens) * 19 // 20])
    data = list(map(jax.device_put, batches(name, training, args.batch, args.steps)))
    data += map(jax.device_put, batches(name, held_out, 16 * args.batch, 2))
    for optimizer in args.only:
      results.append(compare(name, optimizer, args, data))
      print(table(results[-1:]).splitlines()[-1], flush=True)
      if args.json:
        args.json.write_text(json.dumps(results))
  print(table(results))
  if args.plot:
    plot(results, args.plot)


if __name__ == "__main__":
  main()
