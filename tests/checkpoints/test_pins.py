"""Pinned checkpoints are kept."""

from __future__ import annotations

from rosetta_t5.checkpoints import model_dir


def make(folder):
  (folder / "dataset").mkdir(parents=True)
  (folder / "dataset/train_ds-000-of-001").write_text("1")
  (folder / "train_ds-000-of-001.index").write_text("1")
  (folder / "checkpoint").write_text("x")
  return folder


def test_a_pinned_checkpoint_is_not_removed_until_it_is_unpinned(tmp_path):
  folder = make(tmp_path / "checkpoint_1")
  model_dir.pin_checkpoint(folder)
  assert model_dir.is_pinned_checkpoint(folder)
  model_dir.remove_checkpoint_dir(folder)
  model_dir.remove_dataset_checkpoint(folder, "train_ds")
  assert (folder / "dataset/train_ds-000-of-001").exists()
  model_dir.unpin_checkpoint(folder)
  model_dir.remove_checkpoint_dir(folder)
  assert not folder.exists()
  model_dir.remove_checkpoint_dir(folder)


def test_only_dataset_positions_are_removed_from_either_layout(tmp_path):
  folder = make(tmp_path / "checkpoint_1")
  model_dir.remove_dataset_checkpoint(folder, "train_ds")
  assert sorted(path.name for path in folder.rglob("*")) == ["checkpoint", "dataset"]
