"""The command `rosetta-t5`: its verbs, and the report of `doctor`."""

from __future__ import annotations

from importlib import metadata

import pytest

from rosetta_t5 import cli, doctor


@pytest.mark.parametrize("arguments", [[], ["--help"], ["help"]])
def test_help_prints_one_line_for_each_verb(arguments, capsys):
  assert cli.main(arguments) == 0
  shown = capsys.readouterr().out.splitlines()
  for verb in cli.VERBS:
    assert len([line for line in shown if line.split()[:1] == [verb]]) == 1


def test_an_unknown_verb_is_an_error_that_suggests_a_similar_one(capsys):
  assert cli.main(["trian"]) == 2
  error = capsys.readouterr().err
  assert "rosetta-t5 has no verb 'trian'. Did you mean train?" in error
  assert f"verbs: {', '.join(cli.VERBS)}" in error


def test_version_is_that_of_the_package(capsys):
  assert cli.main(["--version"]) == 0
  assert capsys.readouterr().out == f"rosetta-t5 {metadata.version('rosetta-t5')}\n"


def test_a_verb_receives_the_remaining_arguments(monkeypatch):
  monkeypatch.setitem(cli.VERBS, "train", (len, "help"))
  assert cli.main(["train", "--gin_file=a", "--gin.X=1"]) == 2


def test_train_accepts_the_flags_of_t5x(capsys):
  with pytest.raises(SystemExit) as ended:
    cli.main(["train", "--gin_fil=a.gin"])
  assert ended.value.code == 2
  assert "Did you mean: gin_file" in capsys.readouterr().err


def test_doctor_finds_no_problem_in_this_environment(capsys):
  assert doctor.main() == 0, capsys.readouterr().out
  shown = capsys.readouterr().out
  assert f"jax                   {metadata.version('jax')}" in shown
  assert shown.count("device ") == 8
  assert "No problems found." in shown


def test_doctor_reports_missing_and_outdated_packages(monkeypatch, capsys):
  versions = {"optax": "", "flax": "0.10.0"}
  installed = metadata.version

  def version(name):
    if versions.get(name) == "":
      raise metadata.PackageNotFoundError(name)
    return versions.get(name) or installed(name)

  monkeypatch.setattr(metadata, "version", version)
  assert doctor.main() == 1
  shown = capsys.readouterr().out
  assert "optax is missing: pip install 'optax" in shown
  assert "flax 0.10.0 is not " in shown


def test_doctor_reports_another_package_named_t5x(monkeypatch, tmp_path, capsys):
  (tmp_path / "t5x").mkdir()
  (tmp_path / "t5x/__init__.py").write_text("")
  monkeypatch.delitem(__import__("sys").modules, "t5x", raising=False)
  monkeypatch.syspath_prepend(tmp_path)
  assert doctor.main() == 1
  assert "t5x is a different package" in capsys.readouterr().out
