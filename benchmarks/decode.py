"""Times decoding with T5 1.1 on this machine's CPU, beside other engines that load what we write.

  python -m benchmarks.decode                    # ours: greedy and beam 4, batch 16, 512/64 tokens
  python -m benchmarks.decode --beside transformers ctranslate2    # and these, in turns

All engines have the same random weights and inputs and generate the same number of tokens for
each input: no token ends a sequence. Each runs in a process of its own, and they take turns. The result
is the median over the runs, encoder included, and the fraction of tokens that are equal to ours. Where the
time is more than the CPU time, other programs have used the cores, and the times are not comparable.
"""

import argparse
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from benchmarks.turns import TimedRun, time_in_turns
from rosetta_t5.checkpoints.arrays.lazy_arrays import as_stored_array
from rosetta_t5.checkpoints.formats.hugging_face.folder import make_config_and_weights, write
from rosetta_t5.cli.bench import SIZES, model_config
from rosetta_t5.export.functions import load_stablehlo
from rosetta_t5.models import EncoderDecoderModel
from rosetta_t5.networks.transformer import Transformer
from rosetta_t5.parallel.process_settings import keep_freed_memory

Params = dict[str, Any]
_CORES = os.cpu_count() or 1


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


def write_folder(size: str, folder: pathlib.Path) -> None:
  """Writes the random parameters as `rosetta-t5 convert --to hf` does; the name of token n is wN."""
  flat = flatten_dict(random_params(size), sep="/")
  arrays = {f"target/{name}": as_stored_array(array) for name, array in flat.items()}
  network = model_config(size)
  config, weights = make_config_and_weights(arrays, network, {})
  names = {f"w{number}": number for number in range(network.vocab_size)}
  tokenizer = folder / "tokenizer"
  tokenizer.mkdir(parents=True)
  Tokenizer(WordLevel(names, unk_token="w2")).save(str(tokenizer / "tokenizer.json"))
  special = {"pad_token": "w0", "eos_token": "w1", "unk_token": "w2"}
  about = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special})
  (tokenizer / "tokenizer_config.json").write_text(about)
  write(folder, weights, config, tokenizer)


def transformers_decode(
  folder: pathlib.Path, inputs: np.ndarray, new_tokens: int, beams: int
) -> Callable[[], np.ndarray]:
  """Returns the same function for Transformers' T5ForConditionalGeneration.generate."""
  # PyTorch's OpenMP threads spin for milliseconds at the end of each operation. If another program uses one
  # of the cores, a thread that spins keeps the one that it waits for from running, and greedy decoding, which
  # is thousands of short operations, takes five times as long. This is OpenMP's own limit for such a case.
  os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read when PyTorch is imported
  import transformers

  module = transformers.T5ForConditionalGeneration.from_pretrained(folder).eval()
  return _generate(module, inputs, new_tokens, beams)


def onnx_decode(
  folder: pathlib.Path, inputs: np.ndarray, new_tokens: int, beams: int
) -> Callable[[], np.ndarray]:
  """Returns the same function for ONNX Runtime, by Optimum."""
  from optimum.exporters.onnx import main_export
  from optimum.onnxruntime import ORTModelForSeq2SeqLM

  exported = folder / "onnx"
  if not exported.exists():
    main_export(str(folder), exported, task="text2text-generation-with-past", do_validation=False)
  return _generate(ORTModelForSeq2SeqLM.from_pretrained(exported), inputs, new_tokens, beams)


def _generate(
  module: Any, inputs: np.ndarray, new_tokens: int, beams: int
) -> Callable[[], np.ndarray]:
  import torch

  module.generation_config.eos_token_id = None
  tokens = torch.from_numpy(inputs).long()
  options = {"max_new_tokens": new_tokens, "num_beams": beams, "do_sample": False}

  def run() -> np.ndarray:
    with torch.inference_mode():
      decodes = module.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    return decodes[:, 1:].numpy()

  return run


@functools.cache
def open_ctranslate2(folder: pathlib.Path, compute_type: str) -> Any:
  """Returns CTranslate2's Translator of a folder, which computes as many batches at a time as there are cores.

  Two threads for a batch would wait for each other: on a busy machine that took five times the CPU time.
  """
  converted = folder / f"ctranslate2-{compute_type}"
  if not converted.exists():
    command = [pathlib.Path(sys.executable).with_name("ct2-transformers-converter")]
    command += ["--model", folder, "--output_dir", converted, "--quantization", compute_type]
    subprocess.run(command, check=True)
  # Only its converter needs PyTorch, which crashes in a process that has imported TensorFlow.
  sys.modules["torch"] = None  # type: ignore[assignment]
  import ctranslate2

  threads = {"inter_threads": _CORES, "intra_threads": 1}
  return ctranslate2.Translator(str(converted), compute_type=compute_type, **threads)


def translate(translator: Any, rows: Sequence[Any], new_tokens: int, beams: int = 1) -> np.ndarray:
  """Returns the tokens that CTranslate2 generates for each of the rows of tokens."""
  results = translator.translate_batch(
    [[f"w{token}" for token in row] for row in rows],
    beam_size=beams,
    max_batch_size=-(-len(rows) // _CORES),
    max_input_length=0,
    max_decoding_length=new_tokens,
    end_token=[],  # No token ends a sequence.
  )
  return np.array([[int(name[1:]) for name in result.hypotheses[0]] for result in results])


def ctranslate2_decode(
  compute_type: str, folder: pathlib.Path, inputs: np.ndarray, new_tokens: int, beams: int
) -> Callable[[], np.ndarray]:
  """Returns the same function for CTranslate2."""
  translator = open_ctranslate2(folder, compute_type)
  return lambda: translate(translator, inputs, new_tokens, beams)


@functools.cache
def exported(folder: pathlib.Path, shape: tuple[int, int], new_tokens: int) -> pathlib.Path:
  """Returns the folder that `rosetta-t5 export` writes for these sizes and greedy decoding."""
  path = folder.with_name("exported")
  if not path.exists():
    sizes = {"batch_size": shape[0], "input_length": shape[1], "output_length": new_tokens}
    flags = [f"--{name}={value}" for name, value in sizes.items()]
    call = "import sys; from rosetta_t5 import cli; sys.exit(cli.main(sys.argv[1:]))"
    command = [
      sys.executable,
      "-c",
      call,
      "export",
      f"--model_dir={folder}",
      f"--output_dir={path}",
    ]
    subprocess.run([*command, *flags], check=True)
  return path


def saved_model_decode(
  folder: pathlib.Path, inputs: np.ndarray, new_tokens: int, beams: int
) -> Callable[[], np.ndarray]:
  """Returns the same function for the SavedModel, which TensorFlow runs."""
  assert beams == 1, "--beside saved-model needs --beams 1"
  path = exported(folder, inputs.shape, new_tokens)
  import tensorflow as tf

  model = tf.saved_model.load(str(path))
  predict = model.signatures["serving_default"]
  return lambda: predict(text_batch=tf.constant(inputs))["output_0"].numpy()


def stablehlo_decode(
  folder: pathlib.Path, inputs: np.ndarray, new_tokens: int, beams: int
) -> Callable[[], np.ndarray]:
  """Returns the same function for the exported StableHLO."""
  assert beams == 1, "--beside stablehlo needs --beams 1"
  predict = load_stablehlo(exported(folder, inputs.shape, new_tokens) / "stablehlo")
  names = ("decoder_input_tokens", "decoder_target_tokens", "decoder_loss_weights")
  features = dict.fromkeys(names, np.zeros((len(inputs), new_tokens), np.int32))
  return lambda: np.asarray(predict({"encoder_input_tokens": inputs, **features})[0])


OTHERS: dict[str, Callable[..., Callable[[], np.ndarray]]] = {
  "transformers": transformers_decode,
  "onnx": onnx_decode,
  "ctranslate2": functools.partial(ctranslate2_decode, "float32"),
  "ctranslate2-int8": functools.partial(ctranslate2_decode, "int8"),
  "saved-model": saved_model_decode,
  "stablehlo": stablehlo_decode,
}


def main(argv: Sequence[str] | None = None) -> None:
  """Times the implementations in turns and prints one line for each."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--size", choices=SIZES, default="small")
  parser.add_argument("--batch-size", type=int, default=16)
  parser.add_argument("--lengths", type=int, nargs=2, default=(512, 64), metavar=("ENC", "DEC"))
  parser.add_argument("--beams", type=int, nargs="+", default=(1, 4), help="1 is greedy decoding")
  parser.add_argument("--runs", type=int, default=3, help="timed runs of each implementation")
  parser.add_argument("--beside", nargs="+", choices=OTHERS, default=(), help="other engines")
  args = parser.parse_args(argv)
  if min(args.runs, args.batch_size, *args.lengths, *args.beams) < 1:
    parser.error("--runs, --batch-size, --lengths and --beams must be positive")

  shape = (args.batch_size, args.lengths[0])
  highest = model_config(args.size).vocab_size
  inputs = np.random.default_rng(1).integers(2, highest, shape, dtype=np.int32)
  with tempfile.TemporaryDirectory() as root:
    folder = pathlib.Path(root, "model")
    if args.beside:
      write_folder(args.size, folder)
    for beams in args.beams:
      given = (inputs, args.lengths[1], beams)
      makers = {name: functools.partial(OTHERS[name], folder, *given) for name in args.beside}
      makers["ours"] = functools.partial(our_decode, args.size, *given)
      timed = time_in_turns(makers, args.runs)
      for name, runs in timed.items():
        report(f"beam {beams} {name}", runs, timed["ours"][-1].result)


def report(title: str, runs: Sequence[TimedRun], our_tokens: np.ndarray) -> None:
  """Prints the times of an engine, and how many of its tokens are ours."""
  seconds, cpu = (statistics.median(x) for x in zip(*(run[:2] for run in runs), strict=True))
  best = min(run.seconds for run in runs)
  same = np.mean(runs[-1].result == our_tokens)
  print(
    f"{title}: {seconds:.2f} s ({cpu:.2f} s of CPU time), {our_tokens.size / seconds:.0f} tokens/s, at best "
    f"{our_tokens.size / best:.0f}; {same:.1%} of tokens equal ours",
    flush=True,
  )


if __name__ == "__main__":
  main()
