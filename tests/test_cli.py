"""The command `rosetta-t5`: its verbs, and the report of `doctor`."""

from __future__ import annotations

import os
import pathlib
import shlex
import signal
from importlib import metadata

import pytest

from rosetta_t5 import cli
from rosetta_t5.cli import doctor
from rosetta_t5.cli.command import WITH_FLAGS


@pytest.mark.parametrize("arguments", [[], ["--help"], ["help"]])
def test_help_prints_one_line_for_each_verb(arguments, capsys):
  assert cli.main(arguments) == 0
  shown = capsys.readouterr().out.splitlines()
  for name, verb in cli.VERBS.items():
    assert len([line for line in shown if line == f"  {name:<20}{verb.help}"]) == 1


def test_an_unknown_verb_is_an_error_that_suggests_a_similar_one(capsys):
  with pytest.raises(SystemExit) as ended:
    cli.main(["trian"])
  assert ended.value.code == 2
  error = capsys.readouterr().err
  assert "rosetta-t5 has no verb 'trian'. Did you mean train?" in error
  assert f"verbs: {', '.join(cli.VERBS)}" in error


def test_version_is_that_of_the_package(capsys):
  assert cli.main(["--version"]) == 0
  assert capsys.readouterr().out == f"rosetta-t5 {metadata.version('rosetta-t5')}\n"


@pytest.mark.parametrize("name", cli.VERBS)
def test_help_of_a_verb_shows_its_own_options_and_examples_that_can_be_parsed(name, capsys):
  with pytest.raises(SystemExit) as ended:
    cli.main([*name.split(), "--help"])
  assert ended.value.code == 0
  shown = capsys.readouterr().out
  assert shown.startswith(f"usage: rosetta-t5 {name} ")
  assert ("--gin.NAME=VALUE" in shown) == (name in WITH_FLAGS)
  for example in cli.VERBS[name].examples:
    assert f"\n  rosetta-t5 {name} {example}".rstrip() in shown
    words = shlex.split(example.partition(" > ")[0], comments=True)
    assert callable(cli.parse([*name.split(), *words]).run)


def test_help_of_infer_shows_the_options_for_texts_and_not_those_of_t5x_main(capsys):
  with pytest.raises(SystemExit):
    cli.main(["help", "infer"])
  shown = capsys.readouterr().out
  for option in ("--template", "--input", "--output", "--shard_id", "--gin_file"):
    assert f"  {option} " in shown
  assert "--run_mode" not in shown


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ("train --lr=0.1", "--gin.utils.create_learning_rate_scheduler.base_learning_rate=0.1"),
    ("train --batch_size 16", "unknown option --batch_size. Set --gin.BATCH_SIZE=16"),
    ("train --steps=5", "Set --gin.TRAIN_STEPS=5"),
    ("train --model-dir=runs/a", "Set --gin.MODEL_DIR=\"'runs/a'\""),
    ("train --T5Config.emb_dim=8", "Set --gin.T5Config.emb_dim=8"),
    ("infer --model_dir x --input y --batch-size 4", "Did you mean --batch_size?"),
    ("train --gin_fil=a.gin", "unknown option --gin_fil. Did you mean --gin_file"),
    ("train --shard_id=1", "unknown option --shard_id."),
    ("train my.gin", "unexpected argument 'my.gin'. Did you mean --gin_file=my.gin?"),
    ("train gin.STEPS=1", "unexpected argument 'gin.STEPS=1'. Did you mean --gin.STEPS=1?"),
    ("train --gin.STEPS 3", "of the form '--gin.<param>=<value>', got: --gin.STEPS"),
    ("prepare --workes 4", "the following arguments are required: --input, --vocab, --out"),
    ("ckpt show run --stat", "unknown option --stat."),
    ("doctor now", "unexpected argument 'now'."),
    ("doctr", "rosetta-t5 has no verb 'doctr'. Did you mean doctor?"),
  ],
)
def test_wrong_arguments_are_one_error_that_shows_the_right_ones(arguments, message, capsys):
  with pytest.raises(SystemExit) as ended:
    cli.main(arguments.split())
  assert ended.value.code == 2
  error = capsys.readouterr().err
  assert message in error
  assert error.count("error:") == 1


def test_a_run_gets_t5x_flags_whose_values_follow_a_space():
  options = cli.parse(
    ["check", "--devices", "8", "a.gin", "--gin.A='x y'", "--gin_search_paths", "b", "--nodebug"]
  )
  assert options.files == ["a.gin"]
  assert options.flags == ["--devices=8", "--gin.A='x y'", "--gin_search_paths=b", "--nodebug"]


@pytest.mark.parametrize("verb", ["help", "ckpt --help", "completion bash"])
def test_a_closed_pipe_ends_a_verb_silently_with_the_status_of_sigpipe(verb, monkeypatch, capfd):
  read_end, write_end = os.pipe()
  os.close(read_end)
  with open(write_end, "w") as pipe:
    monkeypatch.setattr("sys.stdout", pipe)
    with pytest.raises(SystemExit) as ended:
      cli.main(verb.split())
  assert ended.value.code == 128 + signal.SIGPIPE
  assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
  ("arguments", "status", "message"),
  [
    ("vocab train --input text.txt --size 0 --out out", 2, "must be a positive integer, got '0'"),
    ("vocab train --input text.txt --size 9999 --out out", 1, "Please set it to a value <= "),
    ("vocab train --input none.txt --out out", 1, "There is no file 'none.txt'"),
    (
      "vocab train --input text.txt --out folder",
      1,
      "folder exists, and models may have been trained",
    ),
    ("inspect task --lengths inputs", 2, "must be like inputs=512,targets=128, got 'inputs'"),
    ("inspect no/*.jsonl", 1, "There is no file 'no/*.jsonl'"),
    ("inspect texd.txt", 1, "There is no file 'texd.txt' (did you mean 'text.txt'?)"),
    ("prepare --input text.txt --vocab empty --out new", 1, "empty is not a SentencePiece model"),
    ("prepare --validation-percent nan", 2, "must be a number from 0 to 100, got 'nan'"),
    ("check empty", 2, "the gin files configure no run"),
    ("check --gin.TRAIN_STEPS=3", 2, "the gin files configure no run"),
    ("plan empty --devices 8", 2, "the gin files configure no run"),
    ("report loop", 1, "loop contains no metrics of a run: give a MODEL_DIR"),
    ("check binary", 2, "binary cannot be read as a gin file"),
    ("ckpt show text.txt", 1, "text.txt is not a checkpoint: it is a file of another kind"),
    (
      "ckpt ls fodler",
      1,
      "fodler is not a checkpoint: there is no such file or folder (did you mean",
    ),
    ("ckpt show folder", 1, "folder is not a checkpoint: the folder is empty"),
    ("bench --json folder", 2, "--json: folder must be a file in a folder that exists"),
    (
      "ckpt show file:///tmp/x",
      2,
      "paths that begin with file:// cannot be read: give a local path",
    ),
    (
      "ckpt show .",
      1,
      ". is not a checkpoint: the folder contains binary, empty, folder, loop, pipe",
    ),
    ("report folder --out gs://x/y", 2, "must be a path on this machine, got 'gs://x/y'"),
    ("vocab train --input text.txt --out s3://x", 2, "must be a path on this machine"),
    ("chat text.txt", 1, "There is no folder text.txt: give the MODEL_DIR"),
  ],
)
def test_unsuitable_files_are_one_error_without_a_traceback(
  arguments, status, message, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  pathlib.Path("text.txt").write_text("a text of a few words\n")
  pathlib.Path("empty").write_text("")
  pathlib.Path("binary").write_bytes(b"\xf6\xdb\x01")
  pathlib.Path("folder").mkdir()
  pathlib.Path("loop").symlink_to("loop")
  os.mkfifo("pipe")
  with pytest.raises(SystemExit) as ended:
    cli.main(arguments.split())
  assert ended.value.code == status
  error = capsys.readouterr().err
  assert message in error
  assert error.count("error:") == 1
  assert "--debug shows" not in error


@pytest.mark.parametrize("arguments", ["--debug", "help --debug"])
def test_debug_alone_shows_the_verbs(arguments, monkeypatch, capsys):
  monkeypatch.setenv("ROSETTA_T5_DEBUG", "")
  assert cli.main(arguments.split()) == 0
  assert "usage: rosetta-t5 VERB" in capsys.readouterr().out


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
  assert f"`import t5x` finds {tmp_path}" in capsys.readouterr().out
