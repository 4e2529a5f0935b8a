"""Times requests to a served model, and the same inputs in batches as `infer` computes them, in turns.

  python -m benchmarks.serving                # T5 1.1 small: 64 requests, 16 at a time, 512/64 tokens
  python -m benchmarks.serving --size tiny
  python -m benchmarks.serving --beside-ctranslate2   # and CTranslate2, in the same turns

The weights are random, and hardly any sequence ends by itself: each request generates between half and all of 64 tokens. A
batch ends when its longest sequence does. The inputs have between 17 and 512 tokens; a batch is
computed at the length of its longest one, as `infer` does. Answers are compared with those of the batches.
CTranslate2 gets the same batches, and the requests from 16 threads.
"""

import argparse
import asyncio
import concurrent.futures
import functools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import seqio

from benchmarks.decode import open_ctranslate2, random_params, translate, write_folder
from rosetta_t5 import decoding
from rosetta_t5.cli.bench import SIZES, model_config
from rosetta_t5.decoding.slots import SlotControls
from rosetta_t5.inference.infer_fn import default_buckets
from rosetta_t5.models import EncoderDecoderModel
from rosetta_t5.networks.transformer import Transformer
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.parallel.process_settings import keep_freed_memory
from rosetta_t5.serving import ServedModel
from rosetta_t5.trained_model import OpenedModel
from rosetta_t5.training import InferenceState

_SLOTS = 16


def open_random(size: str, lengths: Mapping[str, int]) -> OpenedModel:
  """Returns a model of a size with random parameters, for inputs and targets of these lengths."""
  vocabulary = seqio.ByteVocabulary()  # Its texts are not looked at.
  decode_fn = functools.partial(decoding.temperature_sample, temperature=0.0)
  options: Any = {"optimizer_def": None, "decode_fn": decode_fn}
  model = EncoderDecoderModel(Transformer(model_config(size)), vocabulary, vocabulary, **options)
  shapes = dict.fromkeys(("encoder_input_tokens", "decoder_input_tokens"), (1, 8))
  variables = jax.eval_shape(lambda: model.get_initial_variables(jax.random.PRNGKey(0), shapes))
  params = jax.tree.map(jax.numpy.asarray, random_params(size))
  state = InferenceState.create({**variables, "params": params})
  partitioner = PjitPartitioner(num_partitions=1)
  return OpenedModel(model, partitioner, state, partitioner.get_mesh_axes(state), lengths)


async def serve(
  model: ServedModel, prompts: Sequence[list[int]], limits: Sequence[int]
) -> tuple[float, list[list[int]], list[float]]:
  """Returns the seconds of all requests, their tokens, and the seconds to the first token of each."""
  gate, firsts = asyncio.Semaphore(_SLOTS), []

  async def ask(prompt: list[int], limit: int) -> list[int]:
    async with gate:
      begun, tokens = time.perf_counter(), []
      async for _, piece in model.generate([(prompt, SlotControls())], limit):
        if not tokens:
          firsts.append(time.perf_counter() - begun)
        tokens += [token.id for token in piece.tokens]
      return tokens

  begun = time.perf_counter()
  answers = await asyncio.gather(*map(ask, prompts, limits))
  return time.perf_counter() - begun, answers, firsts


def compute_batches(
  predict: Any,
  params: Any,
  prompts: Sequence[list[int]],
  limits: Sequence[int],
  total: int,
  lengths: Any,
) -> tuple[float, list[list[int]]]:
  """Returns the seconds of all batches, and their tokens."""
  begun, answers = time.perf_counter(), []
  for start in range(0, len(prompts), _SLOTS):
    rows, ends = prompts[start : start + _SLOTS], limits[start : start + _SLOTS]
    length = next(n for n in lengths if n >= max(map(len, rows)))
    inputs = np.stack([np.pad(row, (0, length - len(row))) for row in rows]).astype(np.int32)
    targets = np.zeros((len(rows), total), np.int32)
    batch = {"encoder_input_tokens": inputs, "decoder_input_tokens": targets}
    decodes = np.asarray(
      predict(params, batch, decoder_params={"max_decode_steps": int(max(ends))})[0]
    )
    answers += [row[:end].tolist() for row, end in zip(decodes, ends, strict=True)]
  return time.perf_counter() - begun, answers


def ask_ctranslate2(
  translator: Any, prompts: Sequence[list[int]], limits: Sequence[int], rows: int
) -> tuple[float, float, list[list[int]]]:
  """Returns the seconds of all requests to CTranslate2, the seconds of CPU time, and the tokens.

  Args:
    translator: CTranslate2's Translator.
    prompts: the inputs.
    limits: the number of tokens to generate for each.
    rows: the number of inputs in a request.
  """

  def ask(start: int) -> list[list[int]]:
    ends = limits[start : start + rows]
    decodes = translate(translator, prompts[start : start + rows], max(ends))
    return [row[:end].tolist() for row, end in zip(decodes, ends, strict=True)]

  begun, cpu_begun = time.perf_counter(), time.process_time()
  with concurrent.futures.ThreadPoolExecutor(_SLOTS if rows == 1 else 1) as clients:
    parts = clients.map(ask, range(0, len(prompts), rows))
    answers = [answer for part in parts for answer in part]
  return time.perf_counter() - begun, time.process_time() - cpu_begun, answers


async def main() -> None:
  """Prints tokens per second of both, for several rounds."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--size", default="small", choices=SIZES)
  parser.add_argument("--requests", type=int, default=64)
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--lengths", type=int, nargs=2, default=(512, 64), help="inputs and targets")
  parser.add_argument("--beside-ctranslate2", action="store_true", help="time CTranslate2 as well")
  options = parser.parse_args()
  root = tempfile.TemporaryDirectory()
  folder = pathlib.Path(root.name, "model")
  if options.beside_ctranslate2:
    write_folder(options.size, folder)
  longest, total = options.lengths
  of_features = {"inputs": longest, "targets": total}
  opened = open_random(options.size, of_features)
  begun = time.perf_counter()
  model = ServedModel(options.size, opened, of_features, _SLOTS, 1000, decoding.Controls(), ())
  model.compile()
  model.start()
  print(f"start {time.perf_counter() - begun:.1f} s", flush=True)
  rng = np.random.default_rng(0)
  count, highest = options.requests, model_config(options.size).vocab_size
  prompts = [
    rng.integers(3, highest, rng.integers(longest // 32 + 1, longest + 1)).tolist()
    for _ in range(count)
  ]
  limits = rng.integers(total // 2, total + 1, count).tolist()
  lengths = (*default_buckets(longest), longest)
  predict = jax.jit(opened.model.predict_batch_with_aux)
  compute = functools.partial(
    compute_batches, predict, opened.state.params, prompts, limits, total, lengths
  )
  compute()  # compiles
  rates: list[tuple[float, float]] = []
  for _ in range(options.rounds):
    # Other prompts than before, so that no slot has their arrays already.
    prompts[:] = [rng.permutation(prompt).tolist() for prompt in prompts]
    marks = [time.process_time()]
    seconds, served, firsts = await serve(model, prompts, limits)
    marks.append(time.process_time())
    batch_seconds, computed = compute()
    marks.append(time.process_time())
    rates.append((sum(limits) / seconds, sum(limits) / batch_seconds))
    equal = np.mean([a == b for a, b in zip(served, computed, strict=True)])
    print(
      f"served {rates[-1][0]:.0f} tokens/s, batches {rates[-1][1]:.0f}; the first token after "
      f"{statistics.median(firsts):.2f} s; {equal:.1%} of the answers are equal; CPU time "
      f"{marks[1] - marks[0]:.0f} and {marks[2] - marks[1]:.0f} s",
      flush=True,
    )
    for kind in ("float32", "int8") if options.beside_ctranslate2 else ():
      translator = open_ctranslate2(folder, kind)
      for rows in (1, _SLOTS):
        their_seconds, cpu, theirs = ask_ctranslate2(translator, prompts, limits, rows)
        equal = np.mean([a == b for a, b in zip(theirs, computed, strict=True)])
        print(
          f"CTranslate2 {kind}, {rows} inputs at a time: {sum(limits) / their_seconds:.0f} tokens/s; "
          f"{equal:.1%} of the answers are equal; CPU time {cpu:.0f} s",
          flush=True,
        )
  print(f"ratio {statistics.median(a / b for a, b in rates):.2f}")
  await model.engine.stop()
  root.cleanup()


if __name__ == "__main__":
  keep_freed_memory()
  asyncio.run(main())
