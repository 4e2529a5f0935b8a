"""The `rosetta-t5` command: its verbs, and what the doctor sees."""

from __future__ import annotations

from importlib import metadata

import pytest

from rosetta_t5 import cli, doctor


@pytest.mark.parametrize("arguments", [[], ["--help"], ["help"]])
def test_help_lists_each_verb_with_one_line(arguments, capsys):
  assert cli.main(arguments) == 0
  shown = capsys.readouterr().out.splitlines()
  for verb in cli.VERBS:
    assert len([line for line in shown if line.split()[:1] == [verb]]) == 1


def test_unknown_verb_names_a_near_one(capsys):
  assert cli.main(["trian"]) == 2
  said = capsys.readouterr().err
  assert "rosetta-t5 has no verb 'trian'. Did you mean train?" in said
  assert f"its verbs: {', '.join(cli.VERBS)}" in said


def test_verbs_hand_their_arguments_on(monkeypatch):
  monkeypatch.setitem(cli.VERBS, "train", lambda arguments: len(arguments))
  assert cli.main(["train", "--gin_file=a", "--gin.X=1"]) == 2


def test_train_takes_t5x_flags(capsys):
  with pytest.raises(SystemExit) as ended:
    cli.main(["train", "--gin_fil=a.gin"])
  assert ended.value.code == 2
  assert "Did you mean: gin_file" in capsys.readouterr().err


def test_doctor_finds_this_environment_well(capsys):
  assert doctor.examine() == 0, capsys.readouterr().out
  shown = capsys.readouterr().out
  assert f"jax                   {metadata.version('jax')}" in shown
  assert shown.count("device ") == 8
  assert "Nothing is wrong." in shown


def test_doctor_names_what_is_missing_and_what_is_too_old(monkeypatch, capsys):
  versions = {"optax": "", "flax": "0.10.0"}
  real = doctor._version
  monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, real(name)))
  assert doctor.examine() == 1
  shown = capsys.readouterr().out
  assert "optax is missing: pip install 'optax" in shown
  assert "flax 0.10.0 is not " in shown


def test_doctor_knows_another_t5x(monkeypatch, tmp_path, capsys):
  (tmp_path / "t5x").mkdir()
  (tmp_path / "t5x/__init__.py").write_text("")
  monkeypatch.delitem(__import__("sys").modules, "t5x", raising=False)
  monkeypatch.syspath_prepend(tmp_path)
  assert doctor.examine() == 1
  assert "t5x is another package than ours" in capsys.readouterr().out
