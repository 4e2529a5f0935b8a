"""Times decoding with T5 1.1 on this machine's CPU, and Hugging Face's `generate` if it is installed.

  python -m benchmarks.decode                    # ours: greedy and beam 4, batch 16, 512/64 tokens
  python -m benchmarks.decode --beside-hf        # and Hugging Face's on PyTorch, in turns

Both implementations have the same random weights and inputs and generate the same number of tokens for
each input: no token ends a sequence. Each runs in a process of its own, and they take turns. The result
is the median over the runs, encoder included, and the fraction of tokens that are equal to ours. Where the
time is more than the CPU time, other programs have used the cores, and the times are not comparable.
"""

import argparse
import functools
import os
import statistics
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.hugging_face import hugging_face_config
from benchmarks.turns import time_in_turns
from rosetta_t5.cli.bench import SIZES, model_config
from rosetta_t5.models import EncoderDecoderModel
from rosetta_t5.networks.transformer import Transformer
from rosetta_t5.parallel.process_settings import keep_freed_memory

Params = dict[str, Any]


def random_params(size: str) -> Params:
  """Returns random parameters as numpy arrays, the same for each call."""
  module = Transformer(model_config(size))
  tokens = jax.ShapeDtypeStruct((1, 1), "int32")
  shapes = jax.eval_shape(
    lambda *args: module.init(*args, enable_dropout=False), jax.random.PRNGKey(0), *[tokens] * 3
  )["params"]
  rng = np.random.default_rng(0)

  def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    if leaf.ndim == 1:
      return np.ones(leaf.shape, np.float32)
    # Query kernels are small, as in T5, which does not scale the logits of attention.
    scale = np.sqrt(leaf.shape[0]) * (8.0 if "query" in jax.tree_util.keystr(path) else 1.0)
    return (rng.standard_normal(leaf.shape, np.float32) / scale).astype(np.float32)

  return jax.tree_util.tree_map_with_path(draw, shapes)


def our_decode(
  size: str, inputs: np.ndarray, new_tokens: int, beams: int
) -> Callable[[], np.ndarray]:
  """Returns a function that decodes the inputs and returns the best sequences, [batch, new_tokens]."""
  keep_freed_memory()  # as the `rosetta-t5` command does
  vocabulary = types.SimpleNamespace(eos_id=-1)  # No token ends a sequence.
  model = EncoderDecoderModel(Transformer(model_config(size)), vocabulary, vocabulary, None)
  params = jax.device_put(random_params(size))
  batch = {
    "encoder_input_tokens": inputs,
    "decoder_input_tokens": np.zeros((len(inputs), new_tokens), np.int32),
  }
  predict = jax.jit(
    lambda params, batch: model.predict_batch_with_aux(params, batch, num_decodes=beams)
  )
  return lambda: np.asarray(predict(params, batch)[0])


def hugging_face_decode(
  size: str, inputs: np.ndarray, new_tokens: int, beams: int
) -> Callable[[], np.ndarray]:
  """Returns the same function for transformers' T5ForConditionalGeneration.generate."""
  # PyTorch's OpenMP threads spin for milliseconds at the end of each operation. If another program uses one
  # of the cores, a thread that spins keeps the one that it waits for from running, and greedy decoding, which
  # is thousands of short operations, takes five times as long. This is OpenMP's own limit for such a case.
  os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read when PyTorch is imported
  import torch
  import transformers

  config = hugging_face_config(size, use_cache=True, eos_token_id=None)
  module = transformers.T5ForConditionalGeneration(config).eval()
  # transformers 5 ties the output layer to the embedding regardless of the configuration.
  module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.clone())
  module.load_state_dict(hugging_face_weights(random_params(size)))
  module.generation_config.eos_token_id = None
  tokens = torch.from_numpy(inputs).long()

  def run() -> np.ndarray:
    with torch.inference_mode():
      decodes = module.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=new_tokens,
        num_beams=beams,
        do_sample=False,
      )
    return decodes[:, 1:].numpy()

  return run


def hugging_face_weights(params: Params) -> dict[str, Any]:
  """Returns the parameters under the names that transformers uses."""
  import torch

  named = {
    "shared.weight": params["token_embedder"]["embedding"],
    "lm_head.weight": params["decoder"]["logits_dense"]["kernel"].T,
  }
  for stack in ("encoder", "decoder"):
    named[f"{stack}.embed_tokens.weight"] = named["shared.weight"]
    named[f"{stack}.final_layer_norm.weight"] = params[stack][f"{stack}_norm"]["scale"]
    bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    named[bias] = params[stack]["relpos_bias"]["rel_embedding"].T
    for name, layer in params[stack].items():
      if name.startswith("layers_"):
        named |= _block_weights(f"{stack}.block.{name.removeprefix('layers_')}.layer", layer)
  return {name: torch.from_numpy(np.array(value)) for name, value in named.items()}


def _block_weights(prefix: str, layer: Params) -> dict[str, np.ndarray]:
  is_decoder = "self_attention" in layer
  attention = {"0.SelfAttention": "self_attention" if is_decoder else "attention"}
  norm = "pre_self_attention_layer_norm" if is_decoder else "pre_attention_layer_norm"
  norms = {"0": norm, "2" if is_decoder else "1": "pre_mlp_layer_norm"}
  if is_decoder:
    attention["1.EncDecAttention"] = "encoder_decoder_attention"
    norms["1"] = "pre_cross_attention_layer_norm"
  weights = {f"{prefix}.{i}.layer_norm.weight": layer[norm]["scale"] for i, norm in norms.items()}
  for theirs, ours in attention.items():
    for short, name in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out")):
      weights[f"{prefix}.{theirs}.{short}.weight"] = layer[ours][name]["kernel"].T
  for name in ("wi_0", "wi_1", "wo"):
    dense = f"{prefix}.{2 if is_decoder else 1}.DenseReluDense.{name}.weight"
    weights[dense] = layer["mlp"][name]["kernel"].T
  return weights


def main(argv: Sequence[str] | None = None) -> None:
  """Times the implementations in turns and prints one line for each."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--size", choices=SIZES, default="small")
  parser.add_argument("--batch-size", type=int, default=16)
  parser.add_argument("--lengths", type=int, nargs=2, default=(512, 64), metavar=("ENC", "DEC"))
  parser.add_argument("--beams", type=int, nargs="+", default=(1, 4), help="1 is greedy decoding")
  parser.add_argument("--runs", type=int, default=3, help="timed runs of each implementation")
  parser.add_argument("--beside-hf", action="store_true", help="time transformers' T5 as well")
  args = parser.parse_args(argv)
  if min(args.runs, args.batch_size, *args.lengths, *args.beams) < 1:
    parser.error("--runs, --batch-size, --lengths and --beams must be positive")

  shape = (args.batch_size, args.lengths[0])
  inputs = np.random.default_rng(1).integers(2, 32000, shape, dtype=np.int32)
  implementations = {"Hugging Face": hugging_face_decode} if args.beside_hf else {}
  implementations["ours"] = our_decode
  for beams in args.beams:
    makers = {
      name: functools.partial(make, args.size, inputs, args.lengths[1], beams)
      for name, make in implementations.items()
    }
    timed = time_in_turns(makers, args.runs)
    our_tokens = timed["ours"][-1].result
    for name, runs in timed.items():
      median = statistics.median(run.seconds for run in runs)
      cpu = statistics.median(run.cpu_seconds for run in runs)
      rate = args.batch_size * args.lengths[1] / median
      same = np.mean(runs[-1].result == our_tokens)
      print(
        f"beam {beams} {name}: {median:.2f} s ({cpu:.2f} s of CPU time), {rate:.0f} tokens/s, {same:.1%} of "
        "tokens equal ours",
        flush=True,
      )


if __name__ == "__main__":
  main()
