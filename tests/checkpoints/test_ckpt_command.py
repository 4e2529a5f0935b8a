"""`rosetta-t5 ckpt` lists, shows, compares and verifies checkpoints."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from rosetta_t5 import cli
from rosetta_t5.checkpoints.arrays.lazy_arrays import as_stored_array
from rosetta_t5.checkpoints.checkpoint_folders import read_arrays
from rosetta_t5.checkpoints.formats import t5x_layouts
from rosetta_t5.conversion import convert
from rosetta_t5.files import CHECKSUMS_NAME

MESH_TF = pathlib.Path(__file__).parent / "fixtures/mesh_tf"


def run(*arguments):
  return cli.main([str(argument) for argument in arguments])


@pytest.mark.slow
def test_checkpoints_are_listed_shown_and_compared(tmp_path, capsys):
  checkpoint = convert.convert(MESH_TF, tmp_path, "t5x")
  assert run("ckpt", "ls", tmp_path) == 0
  assert "1000" in capsys.readouterr().out
  assert run("ckpt", "show", tmp_path) == 0
  out = capsys.readouterr().out
  assert "target/token_embedder/embedding" in out
  assert "32 x 8  float32" in out
  assert "step 1000" in out
  assert "state/param_states" not in out
  assert run("ckpt", "diff", MESH_TF, checkpoint) == 0
  assert "52 parameters are equal, 0 differ" in capsys.readouterr().out


def test_values_that_are_not_finite_differ_from_others(tmp_path, capsys):
  for name, first in (("a", 1.0), ("b", np.nan), ("c", np.inf)):
    values = as_stored_array(np.array([first, np.nan, np.inf], np.float32))
    t5x_layouts.write_orbax(tmp_path / name, {"target/w": values})
  assert run("ckpt", "diff", tmp_path / "a", tmp_path / "a") == 0
  assert run("ckpt", "diff", tmp_path / "a", tmp_path / "b") == 1
  assert "target/w: differs by up to nan" in capsys.readouterr().out
  assert run("ckpt", "diff", tmp_path / "a", tmp_path / "c") == 1
  assert "target/w: differs by up to inf" in capsys.readouterr().out


@pytest.mark.slow
def test_pinned_and_unrecognized_checkpoints_are_marked_in_the_list(tmp_path, capsys):
  convert.convert(MESH_TF, tmp_path, "t5x")
  (tmp_path / "checkpoint_1000/PINNED").write_text("")
  (tmp_path / "checkpoint_2000").mkdir()
  capsys.readouterr()
  assert run("ckpt", "ls", tmp_path) == 0
  first, second = capsys.readouterr().out.splitlines()
  assert first.split()[0] == "checkpoint_1000"
  assert first.endswith("ORBAX, pinned")
  assert second.split()[0] == "checkpoint_2000"
  assert second.endswith("NOT A CHECKPOINT: unknown layout or damaged")


def test_verify_finds_changed_and_missing_files(tmp_path, capsys):
  checkpoint = convert.convert(MESH_TF, tmp_path, "t5x-legacy")
  assert run("ckpt", "verify", tmp_path) == 0
  assert "files compared with checksums.json, 0 problems" in capsys.readouterr().out
  other = checkpoint / "target.encoder.layers_0.mlp.wi_0.kernel/0.0"
  (checkpoint / "target.encoder.layers_0.mlp.wi_1.kernel/0.0").write_bytes(other.read_bytes())
  assert run("ckpt", "verify", tmp_path) == 1
  assert "wi_1.kernel/0.0 is damaged" in capsys.readouterr().out
  other.unlink()
  assert run("ckpt", "verify", tmp_path) == 1
  assert "wi_0/kernel cannot be read" in capsys.readouterr().out


def test_verify_without_stored_checksums_reads_everything_and_reports_that_nothing_was_compared(
  tmp_path, capsys
):
  checkpoint = convert.convert(MESH_TF, tmp_path, "t5x-legacy")
  (checkpoint / CHECKSUMS_NAME).unlink()
  assert run("ckpt", "verify", tmp_path) == 0
  assert "no checksums.json to compare with (verify --write writes it), 0 problems" in (
    capsys.readouterr().out
  )
  assert not (checkpoint / CHECKSUMS_NAME).exists()
  damaged = checkpoint / "target.encoder.layers_0.mlp.wi_0.kernel/0.0"
  damaged.write_bytes(damaged.read_bytes()[:-9])
  assert run("ckpt", "verify", tmp_path) == 1
  output = capsys.readouterr().out
  assert "wi_0/kernel cannot be read" in output
  assert "1 problems" in output


@pytest.mark.slow
def test_verify_finds_values_that_are_not_finite_without_stored_checksums(tmp_path, capsys):
  checkpoint = convert.convert(MESH_TF, tmp_path, "rosetta")
  arrays = read_arrays(checkpoint)
  name = "target/encoder/layers_0/mlp/wi_0/kernel"
  arrays[name] = as_stored_array(np.full(arrays[name].shape, np.nan, np.float32))
  t5x_layouts.write_orbax(tmp_path / "spoilt/checkpoint_1000", arrays)
  assert run("ckpt", "verify", tmp_path / "spoilt") == 1
  size = arrays[name].size
  assert f"{name} contains {size} values that are not finite" in capsys.readouterr().out
