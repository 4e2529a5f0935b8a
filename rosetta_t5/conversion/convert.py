"""Writes a checkpoint in another layout, array by array, and checks that it is the same model."""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray, as_stored_array
from rosetta_t5.checkpoints.arrays.tree_layouts import to_plain_tree, to_scalable_tree
from rosetta_t5.checkpoints.formats import orbax_writer, t5x_legacy
from rosetta_t5.checkpoints.formats.hugging_face import (
  gpt_reader,
  gpt_writer,
  t5_reader,
  t5_writer,
)
from rosetta_t5.checkpoints.formats.hugging_face.t5_names import EMBEDDING
from rosetta_t5.checkpoints.inspect_command import checkpoint_in
from rosetta_t5.checkpoints.model_dir import checkpoint_folders
from rosetta_t5.checkpoints.reading import read_arrays
from rosetta_t5.conversion import verification
from rosetta_t5.conversion.model_facts import ModelFacts, read_facts

FAMILIES = (*t5_reader.FAMILIES, *gpt_reader.FAMILIES)
LAYOUTS = ("t5x", "t5x-legacy", "hf", "rosetta")

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
  parser.add_argument("--model-type", choices=FAMILIES, help="Hugging Face's family")
  parser.add_argument("--activations", help="T5Config.mlp_activations, such as gelu,linear")
  parser.add_argument("--config", help="the run's config.gin, or a config.json; default: SRC's own")
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
      config=options.config,
      tokenizer=options.tokenizer,
    )
  except (ValueError, verification.ConversionError) as error:
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
  config: str | os.PathLike[str] | None = None,
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
    config: what tells of the model what weights do not, such as a decoder's heads: the run's config.gin
      or a config.json; None for the one that lies beside the source.
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
  facts = read_facts(path, arrays, activations, config)
  if tokenizer is None and t5_reader.is_hugging_face(path):
    tokenizer = path
  final = _destination(destination, to, arrays)
  unfinished = final.parent / f"{final.name}.unfinished"
  if unfinished.exists():
    unfinished.rmtree()
  unfinished.mkdir(parents=True)
  say(f"{path} ({_size(arrays)}) to {final}, layout {to}")
  try:
    if to == "hf":
      theirs, their_config = _for_transformers(arrays, facts, model_type)
      t5_writer.write(unfinished, theirs, their_config, tokenizer)
      if not t5_writer.tokenizer_files(tokenizer):
        say("without a tokenizer, which Transformers' pipelines need: --tokenizer gives it")
    else:
      _write_t5x(unfinished, arrays, to)
    verification.check(arrays, unfinished, facts, tokenizer, say)
  except BaseException:
    unfinished.rmtree(missing_ok=True)
    raise
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
  if encoder_only:
    arrays = {
      n: x
      for n, x in arrays.items()
      if n.startswith(("target/encoder/", EMBEDDING)) or n == "state/step"
    }
  if to == "hf" or tree is not None:
    plain = to_plain_tree(arrays)
    if to == "hf":
      return plain
    step = {"state/step": arrays["state/step"]} if "state/step" in arrays else {}
    return {**step, **(to_scalable_tree(plain) if tree == "scalable" else plain)}
  return arrays


def _for_transformers(
  arrays: Arrays, facts: ModelFacts, family: str | None
) -> tuple[Arrays, dict[str, Any]]:
  """Returns weights by Transformers' names, and config.json.

  Raises:
    ValueError: Transformers has no architecture for the model.
  """
  if not any(name.startswith("target/encoder/") for name in arrays):
    gpt_writer.check_fits(arrays)
    if facts.gpt is None:
      raise ValueError(
        "weights do not tell a decoder's heads and windows: give --config the config.gin of the run "
        "that trained it, or the config.json it came with"
      )
    family = family or gpt_writer.model_type(facts.gpt)
    config = gpt_writer.make_config(arrays, facts.gpt, family, facts.ids_are_shifted, facts.base)
    return gpt_writer.weights(arrays, facts.gpt, config), config
  family = family or t5_writer.model_type(arrays)
  config = t5_writer.make_config(arrays, family, facts.activations, facts.base)
  return t5_writer.weights(arrays, family), config


def _destination(destination: str | os.PathLike[str], to: str, arrays: Arrays) -> epath.Path:
  final = epath.Path(destination).absolute()
  if to != "hf" and checkpoint_folders.step_of(final) is None:
    step = int(arrays["state/step"].get()) if "state/step" in arrays else 0
    final = checkpoint_folders.checkpoint_path(final, step)
  if final.exists() and (not final.is_dir() or any(final.iterdir())):
    raise ValueError(f"{final} is there already and not empty: give another DST, or move it away")
  if final.exists():
    final.rmdir()
  return final


def _write_t5x(folder: epath.Path, arrays: Arrays, to: str) -> None:
  arrays = {"state/step": as_stored_array(np.int32(0)), **arrays}
  folder.rmdir()
  if to == "t5x-legacy":
    writer = t5x_legacy.LegacyWriter(folder)
    for name, array in arrays.items():
      writer.write(name, array)
    writer.finish()
  else:
    orbax_writer.write(folder, arrays)


def _size(arrays: Arrays) -> str:
  params = sum(array.size for name, array in arrays.items() if name.startswith("target/"))
  return f"{params / 1e6:.1f} million parameters"
