"""What a conversion does with an adapter: it merges it into the model, or writes it as a PEFT folder."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from rosetta_t5 import adapters
from rosetta_t5.checkpoints import adapter_checkpoints, checkpoint_folders
from rosetta_t5.checkpoints.arrays.parameter_trees import to_plain_tree
from rosetta_t5.checkpoints.formats.hugging_face import folder as hugging_face_folder
from rosetta_t5.checkpoints.formats.hugging_face import peft_folder, peft_writing
from rosetta_t5.checkpoints.formats.hugging_face.name_tables import Arrays
from rosetta_t5.conversion import verification
from rosetta_t5.conversion.model_settings import read_model_settings
from rosetta_t5.files import complete_folder, files_in, write_checksums

Facts = Mapping[str, Any]
Report = Callable[[str], None]


def find_destination(destination: epath.PathLike, step: int | None = None) -> epath.Path:
  """Returns the folder to write, which does not exist or is empty.

  Args:
    destination: the path that the user gave.
    step: the step of a checkpoint, which is written into a folder `checkpoint_STEP`; None for no such folder.
  """
  # Links are resolved, because the finished folder is renamed to this path and cannot replace a link.
  final = epath.Path(destination if "://" in str(destination) else os.path.realpath(destination))
  if step is not None and checkpoint_folders.step_of(final) is None:
    final = checkpoint_folders.checkpoint_path(final, step)
  if final.exists() and (not final.is_dir() or any(final.iterdir())):
    raise ValueError(f"{final} exists and is not empty: set another DST, or move it away")
  return final


def merge(
  path: epath.Path, arrays: Arrays, fact: Facts, config: epath.PathLike | None, report: Report
) -> Arrays:
  """Returns a checkpoint's arrays with its adapter merged, after comparing logits before and after.

  Args:
    path: the checkpoint.
    arrays: its arrays.
    fact: its run fact `adapter`.
    config: see `convert`.
    report: receives the result of the comparison.

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
  report(f"merged adapters.{fact['method']}; logits before and after the merge: {result}")
  return merged


def write(
  path: epath.Path,
  arrays: Arrays,
  fact: Facts,
  destination: epath.PathLike,
  config: epath.PathLike | None,
  model_type: str | None,
  report: Report,
) -> epath.Path:
  """Writes the adapter of a checkpoint as a PEFT folder and returns its path.

  Args:
    path: the checkpoint.
    arrays: its arrays.
    fact: its run fact `adapter`; {} without one.
    destination: the folder to write.
    config: see `convert`.
    model_type: see `convert`.
    report: receives the messages.

  Raises:
    ConversionError: the folder does not compute the same logits when it is read again.
    ValueError: there is no adapter, no base is recorded, or PEFT has no such adapter.
  """
  is_peft = peft_folder.is_peft(path)
  base = fact.get("base") or (path if is_peft else None)
  if base is None:
    raise ValueError(
      f"{path} has no adapter of a recorded base (INITIAL_CHECKPOINT_PATH), which --to peft writes: use --to hf"
    )
  base = peft_folder.find_base(base) if peft_folder.is_peft(base) else base
  adapter, plain = adapters.from_settings(fact), to_plain_tree(arrays)
  own = {n: x for n, x in plain.items() if not adapter.adds(n)}
  settings = read_model_settings(path, own, config)
  their_config, _ = hugging_face_folder.make_config_and_weights(
    own, settings.network, settings.source_config, settings.ids_are_shifted, model_type
  )
  final = find_destination(destination)
  with complete_folder(final) as unfinished:
    unfinished.mkdir(parents=True)
    peft_writing.write(unfinished, adapter, plain, their_config, os.fspath(base))
    again, added = peft_folder.read(unfinished, own, their_config)
    result = verification.compare_networks((plain, adapter), ({**own, **added}, again), settings)
    report(f"logits of the adapter here and of the folder: {result}")
    write_checksums(unfinished, files_in(unfinished))
  if not hugging_face_folder.is_hugging_face(base):
    report(f"PEFT needs the base as a Hugging Face folder: rosetta-t5 convert {base} BASE --to hf")
  report(f"wrote {final}, an adapter of {base}")
  return final
