"""`rosetta-t5 ckpt ls|show|diff|verify PATH`: what is in a checkpoint, of any layout, and is it whole."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from etils import epath

from rosetta_t5.checkpoints.arrays.lazy_arrays import StoredArray
from rosetta_t5.checkpoints.arrays.tree_layouts import to_plain_tree
from rosetta_t5.checkpoints.model_dir import checkpoint_folders
from rosetta_t5.checkpoints.model_dir.pins import is_pinned_checkpoint
from rosetta_t5.checkpoints.reading import read_arrays

CHECKSUMS = "checksums.json"
_READ_AT_ONCE = 64 * 1024 * 1024
_KINDS = {
  checkpoint_folders.CheckpointTypes.ORBAX: "Orbax (T5X, rosetta-t5)",
  checkpoint_folders.CheckpointTypes.T5X: "T5X's older layout",
  checkpoint_folders.CheckpointTypes.T5X_TF: "Mesh TensorFlow",
  checkpoint_folders.CheckpointTypes.HUGGING_FACE: "Hugging Face",
}


def main(arguments: Sequence[str]) -> int:
  """Runs `rosetta-t5 ckpt`; returns the exit status: 1 for a difference or damage."""
  parser = argparse.ArgumentParser("rosetta-t5 ckpt", description=__doc__)
  verbs = parser.add_subparsers(dest="verb", required=True)
  ls = verbs.add_parser("ls", help="the steps in a folder of checkpoints, with sizes and dates")
  show = verbs.add_parser("show", help="a checkpoint's parameters: names, shapes, dtypes")
  show.add_argument("--state", action="store_true", help="the optimizer's state too")
  diff = verbs.add_parser("diff", help="what differs between two checkpoints")
  verify = verbs.add_parser("verify", help="read everything; compare with stored checksums")
  verify.add_argument("--write", action="store_true", help=f"store the checksums ({CHECKSUMS})")
  for verb in (ls, show, diff, verify):
    verb.add_argument("path", metavar="PATH")
  diff.add_argument("other", metavar="OTHER")
  options = parser.parse_args(arguments)
  try:
    if options.verb == "ls":
      return list_steps(options.path)
    if options.verb == "show":
      return show_arrays(options.path, with_state=options.state)
    if options.verb == "diff":
      return show_difference(options.path, options.other)
    return verify_arrays(options.path, write=options.write)
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    return 1


def list_steps(path: str | os.PathLike[str]) -> int:
  """Prints a line for each checkpoint in a folder."""
  steps = checkpoint_folders.all_steps(path)
  if not steps:
    found = checkpoint_folders.detect_checkpoint_type(
      path
    )  # raises, with what is there, if it is none
    print(
      f"{path} is one checkpoint ({_KINDS[found]}), {_gigabytes(_disk_bytes(epath.Path(path)))}"
    )
    return 0
  print(f"{'step':>10}  {'size':>10}  {'saved':<19}  layout")
  for step in steps:
    folder = checkpoint_folders.checkpoint_path(path, step)
    saved = datetime.datetime.fromtimestamp(os.stat(folder).st_mtime).isoformat(" ", "seconds")
    pinned = ", pinned" if is_pinned_checkpoint(folder) else ""
    data = (
      ", with the position in the data"
      if (folder / checkpoint_folders.DATASET_ITEM).is_dir()
      else ""
    )
    try:
      kind = _KINDS[checkpoint_folders.detect_checkpoint_type(folder)]
    except ValueError:
      kind = "NOT A CHECKPOINT: unknown layout or damaged"
    print(f"{step:>10}  {_gigabytes(_disk_bytes(folder)):>10}  {saved:<19}  {kind}{data}{pinned}")
  return 0


def show_arrays(path: str | os.PathLike[str], with_state: bool = False) -> int:
  """Prints a line for each parameter of a checkpoint, and sums."""
  folder = checkpoint_in(path)
  arrays = read_arrays(folder)
  params = {name: array for name, array in arrays.items() if name.startswith("target/")}
  shown = arrays if with_state else params
  width = max(map(len, shown), default=0)
  for name in sorted(shown, key=_natural):
    array = shown[name]
    shape = " x ".join(map(str, array.shape)) or "scalar"
    print(f"{name:<{width}}  {shape:>18}  {array.dtype.name}")
  step = int(arrays["state/step"].get()) if "state/step" in arrays else "unknown"
  states = len(arrays) - len(params) - ("state/step" in arrays)
  print(f"{folder}: {_KINDS[checkpoint_folders.detect_checkpoint_type(folder)]}, step {step}")
  total = sum(array.size for array in params.values())
  print(
    f"{len(params)} parameters of {total:,} numbers; {states} arrays of optimizer and other state"
  )
  if facts := checkpoint_folders.read_run_facts(folder) if folder.is_dir() else {}:
    print("run facts: " + ", ".join(f"{key} = {value}" for key, value in facts.items()))
  return 0


def show_difference(path: str | os.PathLike[str], other: str | os.PathLike[str]) -> int:
  """Prints what differs between two checkpoints' parameters; returns 1 if anything does.

  Two of different layouts are compared in T5X's plain tree.
  """
  left, right = (to_plain_tree(read_arrays(checkpoint_in(place))) for place in (path, other))
  lines = [f"only in {path}: {name}" for name in sorted(set(left) - set(right), key=_natural)]
  lines += [f"only in {other}: {name}" for name in sorted(set(right) - set(left), key=_natural)]
  same = 0
  for name in sorted(set(left) & set(right), key=_natural):
    difference = _difference(left[name], right[name])
    same += difference is None
    if difference is not None:
      lines.append(f"{name}: {difference}")
  print("\n".join(lines)) if lines else None
  print(f"{same} parameters are equal, {len(lines)} differ")
  return 1 if lines else 0


def _difference(a: StoredArray, b: StoredArray) -> str | None:
  if a.shape != b.shape:
    return f"shape {a.shape} and {b.shape}"
  largest, relative = 0.0, 0.0
  for part in _parts(a):
    x, y = (np.asarray(array.read(part), np.float64) for array in (a, b))
    if not np.array_equal(x, y, equal_nan=True):
      largest = max(largest, float(np.nanmax(np.abs(x - y))))
      relative = max(relative, largest / (float(np.nanmax(np.abs(x))) or 1.0))
  dtypes = "" if a.dtype == b.dtype else f" ({a.dtype.name} and {b.dtype.name})"
  if not largest:
    return None if not dtypes else f"equal values{dtypes}"
  return f"differs by up to {largest:.3g}, {relative:.1e} of its largest value{dtypes}"


def verify_arrays(path: str | os.PathLike[str], write: bool = False) -> int:
  """Reads every array, counts what is not finite, compares with stored checksums; 1 for damage."""
  folder = checkpoint_in(path)
  file = (folder if folder.is_dir() else folder.parent) / CHECKSUMS
  known = json.loads(file.read_text()) if file.exists() and not write else {}
  problems, sums = [], {}
  for name, array in read_arrays(folder).items():
    try:
      sums[name], bad = _checksum(array)
    except (OSError, ValueError) as error:
      problems.append(f"{name} cannot be read: {error}")
      continue
    if bad:
      problems.append(f"{name} holds {bad} values that are not finite")
    if known and known.get(name) != sums[name]:
      problems.append(f"{name} is not what it was when its checksum was stored")
  problems += [f"{name} is missing" for name in sorted(set(known) - set(sums))]
  print("\n".join(problems)) if problems else None
  if write and not problems:
    file.write_text(json.dumps(sums, indent=1, sort_keys=True))
  print(f"{folder}: {len(sums)} arrays read, {_compared(known, write)}, {len(problems)} problems")
  return 1 if problems else 0


def _compared(known: Mapping[str, str], write: bool) -> str:
  if known:
    return f"compared with {CHECKSUMS}"
  return f"{CHECKSUMS} written" if write else f"no {CHECKSUMS} to compare with (verify --write)"


def _checksum(array: StoredArray) -> tuple[str, int]:
  """Returns the SHA-256 of an array's shape, dtype and values, and how many are not finite."""
  digest = hashlib.sha256(f"{array.shape} {array.dtype.name}".encode())
  bad = 0
  for part in _parts(array):
    values = np.ascontiguousarray(array.read(part))
    if jnp.issubdtype(values.dtype, jnp.floating):
      bad += int(np.size(values) - np.count_nonzero(np.isfinite(values.astype(np.float32))))
    digest.update(values.tobytes())
  return digest.hexdigest(), bad


def _parts(array: StoredArray) -> list[tuple[slice, ...]]:
  """Returns slices that cover an array, a part of it in memory at a time."""
  if not array.shape:
    return [()]
  rest = (slice(None),) * (array.ndim - 1)
  rows = array.shape[0]
  if array.sliceable and array.nbytes:
    rows = max(1, _READ_AT_ONCE * array.shape[0] // array.nbytes)
  return [(slice(start, start + rows), *rest) for start in range(0, array.shape[0], rows)]


def checkpoint_in(path: str | os.PathLike[str]) -> epath.Path:
  """Returns the checkpoint at `path`, in a folder of them the latest."""
  steps = checkpoint_folders.all_steps(path)
  return checkpoint_folders.checkpoint_path(path, steps[-1]) if steps else epath.Path(path)


def _natural(name: str) -> tuple[bool, list[tuple[int, str]]]:
  """Sorts layers_10 after layers_9, and parameters before the optimizer's state."""
  parts = re.split(r"(\d+)", name)
  return name.startswith("state/"), [(int(p), "") if p.isdigit() else (-1, p) for p in parts]


def _disk_bytes(path: epath.Path) -> int:
  if not path.is_dir():
    return path.stat().length
  return sum(_disk_bytes(entry) for entry in path.iterdir())


def _gigabytes(size: int) -> str:
  return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
