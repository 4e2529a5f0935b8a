"""Times the training step of `rosetta-t5 bench` with Hugging Face's T5 on PyTorch, for comparison.

  python -m benchmarks.hugging_face --size base --batch 128

A step is the forward pass, the backward pass and an AdamW step on float32 parameters, without dropout,
on the batch of `rosetta-t5 bench`. bfloat16 uses autocast. The model is compiled unless --eager is given.
torch and transformers must be installed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from rosetta_t5.cli import bench


def hugging_face_config(size: str, **more: Any) -> Any:
  """Returns the `transformers.T5Config` of a size of T5 1.1, without dropout."""
  import transformers

  emb_dim, heads, head_dim, layers, mlp_dim, vocab_size = bench.SIZES[size]
  return transformers.T5Config(
    vocab_size=vocab_size,
    d_model=emb_dim,
    d_kv=head_dim,
    d_ff=mlp_dim,
    num_layers=layers,
    num_heads=heads,
    feed_forward_proj="gated-gelu",
    tie_word_embeddings=False,
    dropout_rate=0.0,
    decoder_start_token_id=0,
    **more,
  )


def hugging_face_step(args: argparse.Namespace, compiled: bool) -> Callable[[], Any]:
  """Returns a function that makes one step and returns the loss, a tensor on the model's device."""
  import torch
  import transformers

  device = "cuda" if torch.cuda.is_available() else "cpu"
  config = hugging_face_config(args.size, use_cache=False)
  module = transformers.T5ForConditionalGeneration(config).to(device)
  optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, weight_decay=0.01)
  forward = torch.compile(module) if compiled else module
  batch = bench.make_batch(args.batch, args.lengths, config.vocab_size, pack=False)
  inputs = torch.from_numpy(batch["encoder_input_tokens"]).long().to(device)
  labels = torch.from_numpy(batch["decoder_target_tokens"]).long().to(device)

  def run() -> Any:
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(device, torch.bfloat16, enabled=args.dtype == "bfloat16"):
      loss = forward(input_ids=inputs, labels=labels).loss
    loss.backward()
    optimizer.step()
    return loss.detach()

  return run


def measure(args: argparse.Namespace) -> dict[str, Any]:
  """Returns the result of the benchmark (see `bench.measure`)."""
  import torch
  import transformers

  on_gpu = torch.cuda.is_available()
  started = time.perf_counter()
  step = hugging_face_step(args, compiled=not args.eager)
  loss = step()
  float(loss)  # waits for the device
  compile_seconds = time.perf_counter() - started

  def run() -> None:
    nonlocal loss
    loss = step()

  device = torch.cuda.get_device_name() if on_gpu else "cpu"
  return bench.measure(args, run, lambda: float(loss), device) | {
    "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
    "computation": "Hugging Face, " + ("eager" if args.eager else "compiled"),
    "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0,
    "compile_s": compile_seconds,
    "loss_per_token": float(loss),
  }


def main() -> None:
  """Measures the step that the command line describes."""
  parser = argparse.ArgumentParser(description=__doc__)
  bench.add_arguments(parser)
  parser.add_argument("--eager", action="store_true", help="without torch.compile")
  args = parser.parse_args()
  bench.show(measure(args), args.json)


if __name__ == "__main__":
  main()
