"""`rosetta-t5 ckpt ls|show|diff|verify PATH`: inspects and verifies checkpoints of any layout."""

from __future__ import annotations

import argparse
import datetime
import re

import jax.numpy as jnp
import numpy as np
from etils import epath

from rosetta_t5 import manifest
from rosetta_t5.checkpoints import checkpoint_folders
from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.arrays.parameter_trees import to_plain_tree
from rosetta_t5.checkpoints.model_dir import PIN_FILE, is_pinned_checkpoint
from rosetta_t5.checkpoints.restore import (
  UnreadableCheckpointError,
  manifest_folder,
  read_arrays,
  verify_files,
)
from rosetta_t5.user_errors import printable

_LAYOUT_NAMES = {
  checkpoint_folders.CheckpointTypes.ORBAX: "Orbax (T5X, rosetta-t5)",
  checkpoint_folders.CheckpointTypes.T5X: "T5X's older layout",
  checkpoint_folders.CheckpointTypes.T5X_TF: "Mesh TensorFlow",
  checkpoint_folders.CheckpointTypes.HUGGING_FACE: "Hugging Face",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 ckpt`; a verb's status is 1 for a difference or damage."""
  verbs = parser.add_subparsers(required=True, metavar="{ls,show,diff,verify}")
  ls = verbs.add_parser("ls", help="the steps in a folder of checkpoints, with sizes and dates")
  ls.set_defaults(run=lambda options: list_steps(options.path))
  show = verbs.add_parser("show", help="a checkpoint's parameters: names, shapes, dtypes")
  show.add_argument("--state", action="store_true", help="also show the optimizer's state")
  show.set_defaults(run=lambda options: show_arrays(options.path, options.state))
  diff = verbs.add_parser("diff", help="the differences between two checkpoints")
  diff.set_defaults(run=lambda options: show_difference(options.path, options.other))
  verify = verbs.add_parser(
    "verify", help="read everything, and compare the files with checksums.json"
  )
  verify.add_argument("--write", action="store_true", help="write checksums.json if there is none")
  verify.set_defaults(run=lambda options: verify_arrays(options.path, options.write))
  for verb in (ls, show, diff, verify):
    verb.add_argument("path", metavar="PATH", help="a checkpoint, or a folder of checkpoints")
  diff.add_argument("other", metavar="OTHER", help="another one")


def list_steps(path: epath.PathLike) -> int:
  """Prints a line for each checkpoint in a folder."""
  steps = checkpoint_folders.all_steps(path)
  if not steps:
    name = _LAYOUT_NAMES[checkpoint_folders.detect_checkpoint_type(path)]
    print(
      f"{path} is one checkpoint ({name}), {_format_size(checkpoint_folders.disk_bytes(epath.Path(path)))}"
    )
    return 0
  print(f"{'step':>10}  {'size':>10}  {'saved':<19}  layout")
  for step in steps:
    folder = checkpoint_folders.checkpoint_path(path, step)
    saved = datetime.datetime.fromtimestamp(folder.stat().mtime).isoformat(" ", "seconds")
    layout = checkpoint_folders.find_checkpoint_type(folder)
    notes = [_LAYOUT_NAMES[layout] if layout else "NOT A CHECKPOINT: unknown layout or damaged"]
    if (folder / checkpoint_folders.DATASET_ITEM).is_dir():
      notes.append("with the position in the data")
    if is_pinned_checkpoint(folder):
      notes.append("pinned")
    size = _format_size(checkpoint_folders.disk_bytes(folder))
    print(f"{step:>10}  {size:>10}  {saved:<19}  {', '.join(notes)}")
  return 0


def show_arrays(path: epath.PathLike, state: bool = False) -> int:
  """Prints a line for each parameter of a checkpoint (with `state`, for each array), and totals."""
  folder = checkpoint_folders.resolve_checkpoint(path)
  arrays = read_arrays(folder)
  params = {name: array for name, array in arrays.items() if name.startswith("target/")}
  shown = arrays if state else params
  width = max(map(len, shown), default=0)
  for name in sorted(shown, key=_sort_key):
    array = shown[name]
    shape = " x ".join(map(str, array.shape)) or "scalar"
    print(f"{name:<{width}}  {shape:>18}  {array.dtype.name}")
  step = int(arrays["state/step"].get()) if "state/step" in arrays else "unknown"
  states = len(arrays) - len(params) - ("state/step" in arrays)
  print(
    f"{folder}: {_LAYOUT_NAMES[checkpoint_folders.detect_checkpoint_type(folder)]}, step {step}"
  )
  total = sum(array.size for array in params.values())
  print(
    f"{len(params)} parameters with {total:,} values; {states} arrays of optimizer and other state"
  )
  if facts := checkpoint_folders.read_run_facts(folder) if folder.is_dir() else {}:
    text = ", ".join(f"{key} = {value}" for key, value in facts.items())
    print(f"run facts: {printable(text)}")
  return 0


def show_difference(path: epath.PathLike, other: epath.PathLike) -> int:
  """Prints the differences between the parameters of two checkpoints; returns 1 if there are any.

  The parameters are compared in T5X's plain tree, so the layouts may differ.
  """
  folders = [checkpoint_folders.resolve_checkpoint(folder) for folder in (path, other)]
  for folder in folders:
    verify_files(folder)
  left, right = (to_plain_tree(read_arrays(folder)) for folder in folders)
  lines = [f"only in {path}: {name}" for name in sorted(set(left) - set(right), key=_sort_key)]
  lines += [f"only in {other}: {name}" for name in sorted(set(right) - set(left), key=_sort_key)]
  num_equal = 0
  for name in sorted(set(left) & set(right), key=_sort_key):
    if difference := _describe_difference(left[name], right[name]):
      lines.append(f"{name}: {difference}")
    else:
      num_equal += 1
  for line in lines:
    print(line)
  print(f"{num_equal} parameters are equal, {len(lines)} differ")
  return 1 if lines else 0


def verify_arrays(path: epath.PathLike, write: bool = False) -> int:
  """Compares the files of a checkpoint with its manifest, reads every array, and finds non-finite values.

  Args:
    path: a checkpoint, or a folder of checkpoints, whose latest is verified.
    write: whether to write the manifest of a checkpoint that has none and no problems.

  Returns:
    1 if there is a problem, else 0.
  """
  folder, problems, has_manifest = checkpoint_folders.resolve_checkpoint(path), [], True
  try:
    has_manifest = verify_files(folder)
  except UnreadableCheckpointError as error:
    problems.append(error.damage)
  arrays = read_arrays(folder)
  for name, array in arrays.items():
    try:
      num_nonfinite = sum(_count_nonfinite(array.read(part)) for part in array.parts())
    except (OSError, ValueError) as error:
      problems.append(f"{name} cannot be read: {error}")
      continue
    if num_nonfinite:
      problems.append(f"{name} contains {num_nonfinite} values that are not finite")
  for problem in problems:
    print(problem)
  comparison = f"files compared with {manifest.NAME}"
  if not has_manifest:
    comparison = f"no {manifest.NAME} to compare with (verify --write writes it)"
    if write and not problems:
      root = manifest_folder(folder)
      manifest.write(root, [n for n in manifest.files_in(root) if n != PIN_FILE])
      comparison = f"{manifest.NAME} written"
  print(f"{folder}: {len(arrays)} arrays read, {comparison}, {len(problems)} problems")
  return 1 if problems else 0


def _describe_difference(a: StoredArray, b: StoredArray) -> str | None:
  if a.shape != b.shape:
    return f"shape {a.shape} and {b.shape}"
  largest, scale = 0.0, 0.0
  for part in a.parts():
    x, y = (np.asarray(array.read(part), np.float64) for array in (a, b))
    is_equal = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore"):  # ∞ - ∞
      difference = np.where(is_equal, 0.0, np.abs(x - y)).max(initial=0.0)
    largest = float(np.maximum(largest, difference))  # NaN if only one value of a pair is NaN
    scale = float(np.fmax.reduce(np.abs(x), axis=None, initial=scale))
  dtypes = "" if a.dtype == b.dtype else f" ({a.dtype.name} and {b.dtype.name})"
  if not largest:
    return f"equal values{dtypes}" if dtypes else None
  return (
    f"differs by up to {largest:.3g}, {largest / (scale or 1.0):.1e} of its largest value{dtypes}"
  )


def _count_nonfinite(values: np.ndarray) -> int:
  if not jnp.issubdtype(values.dtype, jnp.floating):
    return 0
  return int(np.count_nonzero(~np.isfinite(values.astype(np.float32))))


def _sort_key(name: str) -> tuple[bool, list[tuple[int, str]]]:
  """Returns a key that sorts layers_10 after layers_9, and parameters before other state."""
  parts = re.split(r"(\d+)", name)
  return name.startswith("state/"), [(int(p), "") if p.isdigit() else (-1, p) for p in parts]


def _format_size(size: int) -> str:
  return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
