"""Converts a checkpoint to another layout, array by array, and verifies that the model is the same."""

import argparse
import inspect
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from rosetta_t5 import adapters, terminal
from rosetta_t5.checkpoints import adapter_checkpoints, checkpoint_folders
from rosetta_t5.checkpoints.arrays.lazy_arrays import as_stored_array
from rosetta_t5.checkpoints.arrays.parameter_trees import EMBEDDING, to_plain_tree, to_scalable_tree
from rosetta_t5.checkpoints.arrays.state_dicts import with_averages
from rosetta_t5.checkpoints.checkpoint_folders import STEP, read_arrays, stored_step, verify_files
from rosetta_t5.checkpoints.formats import t5x_layouts
from rosetta_t5.checkpoints.formats.hugging_face import folder as hugging_face_folder
from rosetta_t5.checkpoints.formats.hugging_face import peft_folder, peft_writing
from rosetta_t5.checkpoints.formats.hugging_face.name_tables import Arrays
from rosetta_t5.checkpoints.saved_items import checkpoint_to_use, leaf_dtype
from rosetta_t5.config.model_file import copied_vocabulary
from rosetta_t5.conversion import verification
from rosetta_t5.conversion.model_settings import read_model_settings
from rosetta_t5.files import complete_folder, files_in, write_checksums

LAYOUTS = ("t5x", "t5x-legacy", "hf", "peft", "rosetta")

_CARD = "README.md"


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 convert`."""
  add = parser.add_argument
  add("source", metavar="SRC", help="a checkpoint of any layout, or a MODEL_DIR")
  add("destination", metavar="DST", help="the folder to write")
  add("--to", required=True, choices=LAYOUTS, help="the layout to write")
  add("--dtype", choices=("float32", "bfloat16"), help="the parameters' dtype")
  text = "plain, or scalable (stacked layers), without optimizer state; default: SRC's tree with it"
  add("--tree", choices=("plain", "scalable"), help=text)
  add("--encoder-only", action="store_true", help="leave the decoder out")
  add("--model-type", choices=hugging_face_folder.MODEL_TYPES, help="the family in Transformers")
  add("--config", help="the run's config.gin, or a config.json; default: SRC's own")
  add("--tokenizer", help="spiece.model, or a folder with the tokenizer's files")
  parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
  terminal.tolerate_lost_output()
  names = inspect.signature(convert).parameters
  convert(**{name: value for name, value in vars(options).items() if name in names})
  return 0


def convert(
  source: epath.PathLike,
  destination: epath.PathLike,
  to: str,
  *,
  dtype: str | None = None,
  tree: str | None = None,
  encoder_only: bool = False,
  model_type: str | None = None,
  config: epath.PathLike | None = None,
  tokenizer: epath.PathLike | None = None,
) -> epath.Path:
  """Writes the checkpoint `source` as `destination` and returns the path of what was written.

  The result gets its name only after it has been read again and compared with the source (docs/conversion.md).
  The largest array must fit into memory; the model need not.

  Args:
    source: a checkpoint of any layout; of a run, its best or else its latest is converted.
    destination: the folder to write. T5X's layouts are written to a folder `checkpoint_STEP` in it,
      unless it has such a name itself.
    to: one of LAYOUTS. 't5x' and 'rosetta' are the same layout, Orbax's. 'peft' writes the adapter of a run
      alone, and the others merge it.
    dtype: dtype of the floating-point parameters; None for the source's.
    tree: 'plain' or 'scalable' (layers stacked), with the parameters and the step only; None for the
      source's tree, with the optimizer's state. Not used for 'hf', which has a tree of its own.
    encoder_only: leave out the decoder and the optimizer's state.
    model_type: the family in Transformers; None to derive it from the weights.
    config: a config.gin or config.json with settings that weights do not show, such as a decoder's
      number of heads; None for the one beside the source.
    tokenizer: where the tokenizer's files are; None for those of the source, or of the run that wrote it.

  Raises:
    ConversionError: the logits of the two checkpoints differ.
    ValueError: the source cannot be written in this layout, or is an adapter of another base than the present one.
  """
  path = checkpoint_to_use(source)
  verify_files(path)
  stored: Any = read_arrays(path)
  stored = with_averages(stored) if to in ("hf", "peft") else stored
  fact = checkpoint_folders.adapter_fact(path)
  adapter_checkpoints.check_base(path, fact, stored)
  if to == "peft":
    if dtype or tree or encoder_only:
      raise ValueError(
        "--to peft cannot be combined with --dtype, --tree or --encoder-only: leave them out"
      )
    return _write_adapter(path, stored, fact, destination, config, model_type)
  merged = _merge_adapter(path, stored, fact, config) if fact else stored
  arrays = _select_arrays(merged, to, dtype, tree, encoder_only)
  settings = read_model_settings(path, arrays, config)
  if tokenizer is None:
    folder = peft_folder.find_base(path) if peft_folder.is_peft(path) else path
    is_folder = hugging_face_folder.is_hugging_face(folder)
    tokenizer = folder if is_folder else copied_vocabulary(pathlib.Path(path.parent))
  step = None if to == "hf" else stored_step(arrays) or 0
  final = _find_destination(destination, step)
  params = sum(array.size for name, array in arrays.items() if name.startswith("target/"))
  print(f"converting {path} ({params / 1e6:.1f} million parameters) to {final}, layout {to}")
  with complete_folder(final) as unfinished:
    hf_config = dict(settings.source_config)
    if to == "hf":
      hf_config, weights = hugging_face_folder.make_config_and_weights(
        arrays, settings.network, hf_config, model_type
      )
      unfinished.mkdir(parents=True)
      hugging_face_folder.write(unfinished, weights, hf_config, tokenizer)
      if not hugging_face_folder.tokenizer_files(tokenizer):
        print("no tokenizer was written; Transformers' pipelines need one: set --tokenizer")
    else:
      write = t5x_layouts.write_older if to == "t5x-legacy" else t5x_layouts.write_orbax
      write(unfinished, {STEP: as_stored_array(np.int32(0)), **arrays})
      if hf_config:  # A conversion back to Transformers needs it.
        text = json.dumps(hf_config, indent=2, sort_keys=True)
        (unfinished / hugging_face_folder.CONFIG).write_text(f"{text}\n")
    with terminal.progress_bar("verifying"):
      verified = verification.verify(arrays, path, unfinished, settings)
    print(verified)
    if to == "hf":
      (unfinished / _CARD).write_text(_model_card(path, hf_config, verified))
    write_checksums(unfinished, [n for n in files_in(unfinished) if n != _CARD])
  print(f"wrote {final}")
  return final


def _select_arrays(
  arrays: Arrays, to: str, dtype: str | None, tree: str | None, encoder_only: bool
) -> Arrays:
  """Returns the arrays to write, with the dtype and in the tree in which they are written."""
  if encoder_only:
    kept = ("target/encoder/", EMBEDDING, STEP)
    arrays = {name: array for name, array in arrays.items() if name.startswith(kept)}
  if dtype is not None:
    arrays = {n: x.astype(leaf_dtype(n, x.dtype, dtype)) for n, x in arrays.items()}
  if to == "hf":
    return to_plain_tree(arrays)
  if tree is None:
    return arrays
  plain = to_plain_tree(arrays)
  step = {STEP: arrays[STEP]} if STEP in arrays else {}
  return {**step, **(to_scalable_tree(plain) if tree == "scalable" else plain)}


def _model_card(source: epath.Path, config: Mapping[str, Any], verified: str) -> str:
  """Returns the model card of a folder for Transformers, with the metadata that model hubs read.

  Language, license and base model are those that the source's own card states.

  Args:
    source: the converted checkpoint.
    config: the config.json that was written.
    verified: a sentence about the comparison of the two models.
  """
  from huggingface_hub import ModelCard  # importing it takes time

  file, (architecture,) = source / _CARD, config["architectures"]
  card = file.read_text() if file.exists() else "---\nlibrary_name: transformers\n---\n"
  data: Any = ModelCard(card, ignore_metadata_errors=True).data
  data.library_name, data.tags = "transformers", [config["model_type"], "rosetta-t5"]
  comment = "" if data.license else "\n# license: set it before you publish the model"
  text = f"rosetta-t5 converted this {architecture} from the checkpoint {source.name}. {verified}"
  return f"---\n{data.to_yaml()}{comment}\n---\n\n{text}.\n"


def _find_destination(destination: epath.PathLike, step: int | None = None) -> epath.Path:
  """Returns the folder to write, which does not exist or is empty.

  Args:
    destination: the path that the user gave.
    step: the step of a checkpoint, which is written into a folder `checkpoint_STEP`; None for no such folder.
  """
  # Links are resolved, because the finished folder is renamed to this path and cannot replace a link.
  final = epath.Path(destination if "://" in str(destination) else os.path.realpath(destination))
  if step is not None and checkpoint_folders.step_of(final) is None:
    final = checkpoint_folders.checkpoint_path(final, step)
  if step not in (None, checkpoint_folders.step_of(final)):
    own = checkpoint_folders.checkpoint_path(final.parent, step)
    raise ValueError(f"{final} would contain the checkpoint of step {step}: give {own} as DST")
  if final.exists() and (not final.is_dir() or any(final.iterdir())):
    raise ValueError(f"{final} exists and is not empty: set another DST, or move it away")
  return final


def _merge_adapter(
  path: epath.Path, arrays: Arrays, fact: Mapping[str, Any], config: epath.PathLike | None
) -> Arrays:
  """Returns a checkpoint's arrays with its adapter merged, after comparing logits before and after.

  Args:
    path: the checkpoint.
    arrays: its arrays.
    fact: its run fact `adapter`.
    config: see `convert`.

  Raises:
    ConversionError: the logits differ.
    ValueError: the adapter is a prompt, which cannot be merged.
  """
  adapter = adapters.from_settings(fact)
  if isinstance(adapter, adapters.PromptTuning):
    raise ValueError(f"{path} is a prompt, which cannot be merged into weights: use --to peft")
  merged = adapter_checkpoints.merge(arrays, fact)
  settings = read_model_settings(path, merged, config)
  result = verification.compare_networks((arrays, adapter), (merged, None), settings)
  print(f"merged adapters.{fact['method']}; logits before and after the merge: {result}")
  return merged


def _write_adapter(
  path: epath.Path,
  arrays: Arrays,
  fact: Mapping[str, Any],
  destination: epath.PathLike,
  config: epath.PathLike | None,
  model_type: str | None,
) -> epath.Path:
  """Writes the adapter of a checkpoint as a PEFT folder and returns its path.

  Args:
    path: the checkpoint.
    arrays: its arrays.
    fact: its run fact `adapter`; {} without one.
    destination: the folder to write.
    config: see `convert`.
    model_type: see `convert`.

  Raises:
    ConversionError: the folder does not compute the same logits when it is read again.
    ValueError: there is no adapter, no base is recorded, or PEFT has no such adapter.
  """
  base: Any = fact.get("base") or path
  if peft_folder.is_peft(base):
    base = peft_folder.find_base(base)
  elif base is path:
    raise ValueError(
      f"{path} has no adapter of a recorded base (INITIAL_CHECKPOINT_PATH), which --to peft writes: use --to hf"
    )
  adapter, plain = adapters.from_settings(fact), to_plain_tree(arrays)
  own = {n: x for n, x in plain.items() if not adapter.adds(n)}
  settings = read_model_settings(path, own, config)
  their_config, _ = hugging_face_folder.make_config_and_weights(
    own, settings.network, settings.source_config, model_type
  )
  final = _find_destination(destination)
  with complete_folder(final) as unfinished:
    unfinished.mkdir(parents=True)
    peft_writing.write(unfinished, adapter, plain, their_config, os.fspath(base))
    again, added = peft_folder.read(unfinished, own, their_config)
    result = verification.compare_networks((plain, adapter), ({**own, **added}, again), settings)
    print(f"logits of the adapter here and of the folder: {result}")
    write_checksums(unfinished, files_in(unfinished))
  if not hugging_face_folder.is_hugging_face(base):
    print(f"PEFT needs the base as a Hugging Face folder: rosetta-t5 convert {base} BASE --to hf")
  print(f"wrote {final}, an adapter of {base}")
  return final
