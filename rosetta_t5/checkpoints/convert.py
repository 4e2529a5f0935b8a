"""Writes a checkpoint in another layout, array by array, and checks that it is the same model."""

from __future__ import annotations

import argparse
import ast
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from etils import epath

from rosetta_t5.checkpoints import conversion_check, folders, plain_forward
from rosetta_t5.checkpoints.formats import (
  hugging_face,
  hugging_face_writer,
  orbax_writer,
  t5x_legacy,
)
from rosetta_t5.checkpoints.formats.hugging_face_names import EMBEDDING
from rosetta_t5.checkpoints.inspect_command import checkpoint_in
from rosetta_t5.checkpoints.layouts import plain_tree, scalable_tree
from rosetta_t5.checkpoints.lazy_arrays import StoredArray, stored
from rosetta_t5.checkpoints.reading import read_arrays

LAYOUTS = ("t5x", "t5x-legacy", "hf", "rosetta")
_ACTIVATIONS = re.compile(r"T5Config\.mlp_activations\s*=\s*(\(.*?\)|\[.*?\])", re.DOTALL)

Arrays = dict[str, StoredArray]


def main(arguments: Sequence[str]) -> int:
  """Runs `rosetta-t5 convert SRC DST --to LAYOUT`; returns the exit status."""
  parser = argparse.ArgumentParser("rosetta-t5 convert", description=__doc__)
  parser.add_argument("source", metavar="SRC", help="a checkpoint of any layout, or a MODEL_DIR")
  parser.add_argument("destination", metavar="DST", help="the folder to write")
  parser.add_argument("--to", required=True, choices=LAYOUTS, help="the layout to write")
  parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the parameters")
  parser.add_argument("--tree", choices=("plain", "scalable"), help="T5X's tree; default: as it is")
  parser.add_argument("--encoder-only", action="store_true", help="leave the decoder out")
  parser.add_argument("--model-type", choices=hugging_face.FAMILIES, help="Hugging Face's family")
  parser.add_argument("--activations", help="T5Config.mlp_activations, such as gelu,linear")
  parser.add_argument("--tokenizer", help="spiece.model, or a folder with the tokenizer's files")
  options = parser.parse_args(arguments)
  try:
    convert(
      options.source,
      options.destination,
      options.to,
      dtype=options.dtype,
      tree=options.tree,
      encoder_only=options.encoder_only,
      model_type=options.model_type,
      activations=tuple(options.activations.split(",")) if options.activations else None,
      tokenizer=options.tokenizer,
    )
  except (ValueError, conversion_check.ConversionError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  return 0


def convert(
  source: str | os.PathLike[str],
  destination: str | os.PathLike[str],
  to: str,
  *,
  dtype: str | None = None,
  tree: str | None = None,
  encoder_only: bool = False,
  model_type: str | None = None,
  activations: tuple[str, ...] | None = None,
  tokenizer: str | os.PathLike[str] | None = None,
  say: Callable[[str], None] = print,
) -> epath.Path:
  """Writes the checkpoint `source` as `destination` and returns what was written.

  Nothing has its name before both sides have made the same logits of real text. Memory is needed for
  the largest array, not for the model.

  Args:
    source: a checkpoint of any layout; a folder of checkpoints means its latest.
    destination: the folder to write; for T5X's layouts a folder `checkpoint_STEP` in it, unless it
      is called so itself.
    to: one of LAYOUTS. 't5x' and 'rosetta' are one layout, Orbax's.
    dtype: of the floating-point parameters; None for the source's.
    tree: 'plain' or 'scalable' (layers stacked); None for the source's. 'hf' has its own.
    encoder_only: leave the decoder and the optimizer's state out.
    model_type: Hugging Face's family; None for what the weights look like.
    activations: T5Config.mlp_activations; None for what the source's config or weights say.
    tokenizer: where the tokenizer's files are; None for the source, if it has them.
    say: is told what happens.

  Raises:
    ConversionError: the two sides' logits differ.
    ValueError: the source cannot be written so.
  """
  started = time.monotonic()
  path = checkpoint_in(source)
  arrays = _cast(read_arrays(path), dtype)
  arrays = _chosen(arrays, to, tree, encoder_only)
  activations = activations or _activations(path, arrays)
  if tokenizer is None and hugging_face.is_hugging_face(path):
    tokenizer = path
  final = _destination(destination, to, arrays)
  unfinished = final.parent / f"{final.name}.unfinished"
  if unfinished.exists():
    unfinished.rmtree()
  unfinished.mkdir(parents=True)
  say(f"{path} ({_size(arrays)}) to {final}, layout {to}")
  if to == "hf":
    family = model_type or hugging_face_writer.model_type(arrays)
    base = hugging_face.read_config(path) if hugging_face.is_hugging_face(path) else None
    config = hugging_face_writer.make_config(arrays, family, activations, base)
    theirs = hugging_face_writer.weights(arrays, family)
    hugging_face_writer.write(unfinished, theirs, config, tokenizer)
  else:
    _write_t5x(unfinished, arrays, to)
  _check(arrays, unfinished, to, activations, tokenizer, say)
  unfinished.rename(final)
  seconds = time.monotonic() - started
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
  say(f"wrote {final} in {seconds:.0f} s; at most {peak:.2f} GB of memory")
  return final


def _cast(arrays: Arrays, dtype: str | None) -> Arrays:
  if dtype is None:
    return arrays
  return {
    name: array.astype(dtype)
    if name.startswith("target/") and jnp.issubdtype(array.dtype, jnp.floating)
    else array
    for name, array in arrays.items()
  }


def _chosen(arrays: Arrays, to: str, tree: str | None, encoder_only: bool) -> Arrays:
  """Returns what is written, in the tree it is written in."""
  if to == "hf" and not any("/encoder/" in name for name in arrays):
    has_bias = any("relpos_bias" in name for name in arrays)
    raise ValueError(
      (
        "this is a decoder-only model with T5's relative bias, for which Transformers has no "
        "architecture"
        if has_bias
        else "folders of Transformers' decoder-only architectures are read, but not written"
      )
      + ": it can be written as t5x, t5x-legacy or rosetta"
    )
  if encoder_only:
    arrays = {
      n: x
      for n, x in arrays.items()
      if n.startswith(("target/encoder/", EMBEDDING)) or n == "state/step"
    }
  if to == "hf" or tree is not None:
    plain = plain_tree(arrays)
    if to == "hf":
      return plain
    step = {"state/step": arrays["state/step"]} if "state/step" in arrays else {}
    return {**step, **(scalable_tree(plain) if tree == "scalable" else plain)}
  return arrays


def _activations(path: epath.Path, arrays: Arrays) -> tuple[str, ...]:
  """Returns T5Config.mlp_activations as the source's own config has it, else by its weights."""
  if hugging_face.is_hugging_face(path):
    return hugging_face.activations(hugging_face.read_config(path))
  file = path.parent / "config.gin"
  match = _ACTIVATIONS.search(file.read_text()) if file.exists() else None
  return tuple(ast.literal_eval(match[1])) if match else plain_forward.default_activations(arrays)


def _destination(destination: str | os.PathLike[str], to: str, arrays: Arrays) -> epath.Path:
  final = epath.Path(destination).absolute()
  if to != "hf" and folders.step_of(final) is None:
    step = int(arrays["state/step"].get()) if "state/step" in arrays else 0
    final = folders.checkpoint_path(final, step)
  if final.exists() and (not final.is_dir() or any(final.iterdir())):
    raise ValueError(f"{final} is there already and not empty: give another DST, or move it away")
  if final.exists():
    final.rmdir()
  return final


def _write_t5x(folder: epath.Path, arrays: Arrays, to: str) -> None:
  arrays = {"state/step": stored(np.int32(0)), **arrays}
  folder.rmdir()
  if to == "t5x-legacy":
    writer = t5x_legacy.LegacyWriter(folder)
    for name, array in arrays.items():
      writer.write(name, array)
    writer.finish()
  else:
    orbax_writer.write(folder, arrays)


def _check(
  arrays: Mapping[str, StoredArray],
  folder: epath.Path,
  to: str,
  activations: tuple[str, ...],
  tokenizer: str | os.PathLike[str] | None,
  say: Callable[[str], None],
) -> None:
  """Raises ConversionError unless what was written makes the source's logits."""
  tokens = conversion_check.text_tokens(arrays[EMBEDDING].shape[0], tokenizer)
  before = conversion_check.outputs(arrays, tokens, activations)
  written = read_arrays(folder)
  dtype = arrays[EMBEDDING].dtype
  difference = conversion_check.compare(
    "this project's own forward pass",
    before,
    conversion_check.outputs(written, tokens, activations),
    dtype,
  )
  say(f"logits of real text, both sides read again: largest difference {difference:.1e}")
  if to != "hf":
    return
  size = sum(array.nbytes for array in written.values())
  theirs = conversion_check.transformers_outputs(folder, tokens, size)
  if theirs is None:
    say("PyTorch's Transformers is not installed, or the model is large: not compared with it")
    return
  difference = conversion_check.compare("Transformers", before, theirs, dtype)
  say(f"logits by Transformers: largest difference {difference:.1e}")


def _size(arrays: Arrays) -> str:
  params = sum(array.size for name, array in arrays.items() if name.startswith("target/"))
  return f"{params / 1e6:.1f} million parameters"
