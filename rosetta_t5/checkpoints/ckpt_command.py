"""`rosetta-t5 ckpt ls|show|diff|verify PATH`: inspects and verifies checkpoints of any layout."""

import argparse
import datetime
import pathlib

import jax.numpy as jnp
import numpy as np
from etils import epath

from rosetta_t5.checkpoints import checkpoint_folders
from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.arrays.parameter_trees import to_plain_tree
from rosetta_t5.checkpoints.saved_items import PIN_FILE, is_pinned_checkpoint
from rosetta_t5.files import CHECKSUMS_NAME, files_in, write_checksums
from rosetta_t5.terminal import size_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 ckpt`.

  The exit status is 1 if diff finds a difference or verify a problem.
  """
  verbs = parser.add_subparsers(required=True, metavar="{ls,show,diff,verify}")
  ls = verbs.add_parser("ls", help="the steps in a folder of checkpoints, with sizes and dates")
  ls.set_defaults(run=lambda options: list_steps(options.path))
  show = verbs.add_parser("show", help="a checkpoint's parameters: names, shapes, dtypes")
  show.add_argument("--state", action="store_true", help="also show the optimizer's state")
  show.set_defaults(run=lambda options: show_arrays(options.path, options.state))
  diff = verbs.add_parser("diff", help="the differences between two checkpoints")
  diff.set_defaults(run=lambda options: show_difference(options.path, options.other))
  verify = verbs.add_parser("verify", help="read everything and compare it with checksums.json")
  verify.add_argument("--write", action="store_true", help="write checksums.json if there is none")
  verify.set_defaults(run=lambda options: verify_arrays(options.path, options.write))
  for verb in (ls, show, diff, verify):
    verb.add_argument("path", metavar="PATH", help="a checkpoint, or a folder of checkpoints")
  diff.add_argument("other", metavar="OTHER", help="the checkpoint to compare with")


def list_steps(path: epath.PathLike) -> int:
  """Prints a line for each checkpoint in a folder, or for the one at `path`."""
  steps = checkpoint_folders.all_steps(path)
  folders = [checkpoint_folders.checkpoint_path(path, step) for step in steps] or [epath.Path(path)]
  if not folders[0].exists():
    raise ValueError(f"{path} is not a checkpoint: {checkpoint_folders.describe(folders[0])}")
  for folder in folders:
    layout = checkpoint_folders.find_checkpoint_type(folder)
    notes = [layout.value if layout else "NOT A CHECKPOINT: unknown layout or damaged"]
    if (folder / checkpoint_folders.DATASET_ITEM).is_dir():
      notes.append("with the position in the data")
    if is_pinned_checkpoint(folder):
      notes.append("pinned")
    size = sum(file.stat().st_size for file in pathlib.Path(folder).rglob("*") if file.is_file())
    saved = datetime.datetime.fromtimestamp(folder.stat().mtime).isoformat(" ", "seconds")
    print(f"{folder.name:<20}  {size / 1e9:>9.3f} GB  {saved}  {', '.join(notes)}")
  return 0


def show_arrays(path: epath.PathLike, state: bool = False) -> int:
  """Prints a line for each parameter of a checkpoint (with `state`, for each array), and totals."""
  folder = checkpoint_folders.resolve_checkpoint(path)
  arrays = checkpoint_folders.read_arrays(folder)
  params = {name: array for name, array in arrays.items() if name.startswith("target/")}
  shown = arrays if state else params
  width = max(map(len, shown), default=0)
  for name, array in sorted(shown.items()):
    shape = " x ".join(map(str, array.shape)) or "scalar"
    print(f"{name:<{width}}  {shape:>18}  {array.dtype.name}")
  layout = checkpoint_folders.detect_checkpoint_type(folder)
  step = checkpoint_folders.stored_step(arrays)
  print(f"{folder}: {layout.value}, step {step}")
  rest = {name: array for name, array in arrays.items() if name not in params}
  for kind, group in (("parameters", params), ("optimizer state", rest)):
    values = sum(array.size for array in group.values())
    size = sum(array.size * array.dtype.itemsize for array in group.values())
    print(f"{kind}: {len(group)} arrays, {values:,} values, {size_text(size)}")
  return 0


def show_difference(path: epath.PathLike, other: epath.PathLike) -> int:
  """Prints the differences between the parameters of two checkpoints; returns 1 if there are any.

  The parameters are compared in T5X's plain tree, so the layouts may differ.
  """
  folders = [checkpoint_folders.resolve_checkpoint(folder) for folder in (path, other)]
  for folder in folders:
    checkpoint_folders.verify_files(folder)
  left, right = (to_plain_tree(checkpoint_folders.read_arrays(folder)) for folder in folders)
  lines = [f"only in {path}: {name}" for name in sorted(left.keys() - right.keys())]
  lines += [f"only in {other}: {name}" for name in sorted(right.keys() - left.keys())]
  shared = sorted(left.keys() & right.keys())
  differences = {name: _describe_difference(left[name], right[name]) for name in shared}
  lines += [f"{name}: {text}" for name, text in differences.items() if text]
  num_equal = sum(not text for text in differences.values())
  print("\n".join([*lines, f"{num_equal} parameters are equal, {len(lines)} differ"]))
  return 1 if lines else 0


def verify_arrays(path: epath.PathLike, write: bool = False) -> int:
  """Compares the files of a checkpoint with its checksums, reads every array, and finds non-finite values.

  Args:
    path: a checkpoint, or a folder of checkpoints, whose latest is verified.
    write: whether to write the checksums of a checkpoint that has none and no problems.

  Returns:
    1 if there is a problem, else 0.
  """
  folder, problems, has_checksums = checkpoint_folders.resolve_checkpoint(path), [], True
  try:
    has_checksums = checkpoint_folders.verify_files(folder)
  except checkpoint_folders.UnreadableCheckpointError as error:
    problems.append(str(error))
  arrays: dict[str, StoredArray] = {}
  try:
    arrays = checkpoint_folders.read_arrays(folder)
  except checkpoint_folders.UnreadableCheckpointError as error:
    problems.append(str(error))
  for name, array in arrays.items():
    try:
      is_float = jnp.issubdtype(array.dtype, jnp.floating)
      parts = (array.read(part) for part in array.parts())
      if num_nonfinite := sum(np.sum(~np.isfinite(x.astype(float))) for x in parts if is_float):
        problems.append(f"{name} contains {num_nonfinite} values that are not finite")
    except (OSError, ValueError) as error:
      problems.append(f"{name} cannot be read: {error}")
  comparison = f"files compared with {CHECKSUMS_NAME}"
  if not has_checksums:
    comparison = f"no {CHECKSUMS_NAME} to compare with (verify --write writes it)"
    if write and not problems:
      root = checkpoint_folders.checksums_folder(folder)
      write_checksums(root, [n for n in files_in(root) if n != PIN_FILE])
      comparison = f"{CHECKSUMS_NAME} written"
  summary = f"{folder}: {len(arrays)} arrays read, {comparison}, {len(problems)} problems"
  print("\n".join([*problems, summary]))
  return 1 if problems else 0


def _describe_difference(a: StoredArray, b: StoredArray) -> str:
  """Returns how two arrays differ; "" if they are equal."""
  if a.shape != b.shape:
    return f"shape {a.shape} and {b.shape}"
  largest = 0.0
  for part in a.parts():
    x, y = (np.asarray(array.read(part), np.float64) for array in (a, b))
    is_equal = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore"):  # ∞ - ∞
      difference = np.where(is_equal, 0.0, np.abs(x - y)).max(initial=0.0)
    largest = float(np.maximum(largest, difference))  # NaN if only one value of a pair is NaN
  is_same = not largest and a.dtype == b.dtype
  return "" if is_same else f"differs by up to {largest:.3g} ({a.dtype.name} and {b.dtype.name})"
