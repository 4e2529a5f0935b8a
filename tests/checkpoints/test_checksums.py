"""Damage to any file of a checkpoint is found when the checkpoint is read."""

from __future__ import annotations

import itertools
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tiny_state import Counter, Setup, Tiny, write_older_layout

from rosetta_t5 import cli
from rosetta_t5.checkpoints import UnreadableCheckpointError, read_run_facts
from rosetta_t5.checkpoints.dataset_position import DatasetArgs, DatasetCheckpointHandler
from rosetta_t5.checkpoints.reading import read_arrays

DATASET_FILE = "train_ds-000-of-001"


@pytest.fixture(scope="module", params=["orbax", "legacy"])
def checkpoint(request, tmp_path_factory) -> pathlib.Path:
  """A checkpoint whose larger arrays have files of their own."""
  folder = tmp_path_factory.mktemp(request.param)
  setup = Setup(module=Tiny(width=1024))
  counter = Counter()
  next(counter)
  if request.param == "legacy":
    for step in (6, 7):
      write_older_layout(folder, setup.state(step, seed=step))
  else:
    manager = setup.manager(folder, dataset_iterator=counter)
    manager.run_facts = {"random_seed": 3, "started_from": "somewhere"}
    manager.save(setup.state(step=6, seed=1))
    manager.save(setup.state(step=7))
    manager.close()
  return folder / "checkpoint_7"


def contents(folder: pathlib.Path) -> tuple[dict[str, bytes], dict[str, Any], int]:
  """Returns what a run restores: the arrays' values, the run's facts and the data's position."""
  counter = Counter()
  if (folder / "dataset").exists():
    DatasetCheckpointHandler(DATASET_FILE).restore(folder / "dataset", DatasetArgs(counter))
  arrays = {name: array.get().tobytes() for name, array in read_arrays(folder).items()}
  return arrays, read_run_facts(folder), counter.position


def damages(data: bytes) -> Iterator[bytes]:
  """Yields damaged versions of a file's contents: bytes flipped, cut short, zeros."""
  for n in {0, len(data) - 1, *np.random.default_rng(0).integers(len(data), size=6).tolist()}:
    yield data[:n] + bytes([data[n] ^ (1 << n % 8)]) + data[n + 1 :]
  yield from (b"", data[: len(data) // 2], bytes(len(data)))


def merged_files(folder: pathlib.Path) -> set[pathlib.Path]:
  """Returns the files that only the database of one process uses, which Orbax merges into one of all."""
  merged = folder / "state/ocdbt.process_0"
  return {file for file in files_of(merged) if file.stat().st_size < 4096}


def largest_file(folder: pathlib.Path) -> pathlib.Path:
  return max(files_of(folder), key=lambda file: file.stat().st_size)


def files_of(folder: pathlib.Path) -> list[pathlib.Path]:
  return sorted(path for path in folder.rglob("*") if path.is_file())


def is_noticed(folder: pathlib.Path, undamaged: Any) -> bool:
  """Returns whether reading `folder` fails; asserts that it returns the undamaged values otherwise."""
  try:
    assert contents(folder) == undamaged
  except ValueError:
    return True
  return False


def test_no_damage_to_any_file_changes_what_is_restored(checkpoint):
  undamaged = contents(checkpoint)
  noticed = set()
  for file in files_of(checkpoint):
    data = file.read_bytes()
    for damaged in damages(data):
      file.write_bytes(damaged)
      if is_noticed(checkpoint, undamaged):
        noticed.add(file)
    file.unlink()
    is_noticed(checkpoint, undamaged)
    file.write_bytes(data)
  # Nothing that is restored is in these files, nor in those that Orbax merged into others.
  unused = {"commit_success.txt", "_sharding", "process_0"}
  unnoticed = {f for f in files_of(checkpoint) if f not in noticed} - merged_files(checkpoint)
  assert {file.name for file in unnoticed} <= unused
  assert largest_file(checkpoint) in noticed


def test_files_exchanged_within_a_checkpoint_or_with_another_are_noticed(checkpoint):
  undamaged = contents(checkpoint)
  other = checkpoint.with_name("checkpoint_6")
  equal_size = itertools.groupby(
    sorted(files_of(checkpoint), key=lambda file: file.stat().st_size),
    key=lambda file: file.stat().st_size,
  )
  pairs = [pair for _, files in equal_size for pair in itertools.combinations(files, 2)]
  pairs += [(file, other / file.relative_to(checkpoint)) for file in files_of(checkpoint)]
  num_noticed = 0
  for first, second in pairs:
    data = first.read_bytes()
    if second.exists() and second.read_bytes() != data:
      first.write_bytes(second.read_bytes())
      num_noticed += is_noticed(checkpoint, undamaged)
      first.write_bytes(data)
  assert num_noticed


def test_the_position_of_another_step_is_damage(tmp_path, capsys):
  setup, counter = Setup(), Counter()
  manager = setup.manager(tmp_path, dataset_iterator=counter)
  for step in (6, 7):
    next(counter)
    manager.save(setup.state(step))
  manager.close()
  shutil.copytree(
    tmp_path / "checkpoint_6/dataset", tmp_path / "checkpoint_7/dataset", dirs_exist_ok=True
  )
  assert cli.main(["ckpt", "verify", str(tmp_path)]) == 1
  assert "dataset contains the position of step 6" in capsys.readouterr().out
  with pytest.raises(UnreadableCheckpointError, match="dataset contains the position of step 6"):
    setup.manager(tmp_path, dataset_iterator=counter).restore()


def test_verify_finds_damage_to_the_position_in_the_data(tmp_path, capsys):
  setup = Setup()
  manager = setup.manager(tmp_path, dataset_iterator=Counter())
  manager.save(setup.state(7))
  manager.close()
  verify = ["ckpt", "verify", str(tmp_path)]
  assert cli.main(verify) == 0
  (tmp_path / "checkpoint_7/dataset" / DATASET_FILE).write_text("8")
  assert cli.main(verify) == 1
  assert f"{DATASET_FILE} has changed since it was saved" in capsys.readouterr().out


def test_the_error_names_the_checkpoint_and_the_array(checkpoint, tmp_path):
  copy = shutil.copytree(checkpoint, tmp_path / "checkpoint_7")
  damaged = bytearray(largest_file(copy).read_bytes())
  damaged[len(damaged) // 2] ^= 1
  largest_file(copy).write_bytes(damaged)
  with pytest.raises(ValueError, match=r"w[io].*checkpoint_7|checkpoint_7.*w[io]"):
    contents(copy)


def test_a_missing_file_of_checksums_is_damage(checkpoint, tmp_path):
  copy = shutil.copytree(checkpoint, tmp_path / "checkpoint_7")
  next(file for file in files_of(copy) if file.name.startswith("checksums-")).unlink()
  if (copy / "state").exists():
    with pytest.raises(
      UnreadableCheckpointError, match=r"checksums-00000-of-00001\.json are missing"
    ):
      read_arrays(copy)
  else:  # T5X's older layout has no run facts that would state that there were checksums
    assert read_arrays(copy)
