"""Pinned checkpoints stay."""

from __future__ import annotations

from rosetta_t5.checkpoints.model_dir import pins


def make(folder):
  (folder / "dataset").mkdir(parents=True)
  (folder / "dataset/train_ds-000-of-001").write_text("1")
  (folder / "train_ds-000-of-001.index").write_text("1")
  (folder / "checkpoint").write_text("x")
  return folder


def test_pinned_checkpoint_is_not_removed_until_unpinned(tmp_path):
  folder = make(tmp_path / "checkpoint_1")
  pins.pin_checkpoint(folder)
  assert pins.is_pinned_checkpoint(folder)
  pins.remove_checkpoint_dir(folder)
  pins.remove_dataset_checkpoint(folder, "train_ds")
  assert (folder / "dataset/train_ds-000-of-001").exists()
  pins.unpin_checkpoint(folder)
  pins.remove_checkpoint_dir(folder)
  assert not folder.exists()
  pins.remove_checkpoint_dir(folder)


def test_dataset_positions_go_from_either_layout_and_nothing_else_does(tmp_path):
  folder = make(tmp_path / "checkpoint_1")
  pins.remove_dataset_checkpoint(folder, "train_ds")
  assert sorted(path.name for path in folder.rglob("*")) == ["checkpoint", "dataset"]
