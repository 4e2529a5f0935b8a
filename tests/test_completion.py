"""`rosetta-t5 completion`: what real shells complete with its scripts."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess

import pytest

from rosetta_t5 import cli

_BASH = """
source ./script
complete_words() {
  COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
  _shtab_rosetta_t5 2> /dev/null
  echo "${COMPREPLY[@]}"
}
"""
_ZSH = r"""
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "stty columns 300; fpath=($PWD \$fpath); autoload -U compinit; compinit -u -D; echo REA''DY"
zpty -r -m shell line '*READY*'
sleep 1
for words in "$@"; do
  zpty -w -n shell $words$'\t'
  sleep 2
  zpty -w -n shell $'\C-u'  # clears the line; a command that ran would read the next one
done
sleep 1
while zpty -r -t shell line; do print -rn -- $line; done
"""


@pytest.fixture
def folder(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> pathlib.Path:
  """A folder with a gin file, another file, and completion scripts of both shells."""
  for shell, name in (("bash", "script"), ("zsh", "_rosetta-t5")):
    assert cli.main(["completion", shell]) == 0
    (tmp_path / name).write_text(capsys.readouterr().out)
  (tmp_path / "my_run.gin").write_text("")
  (tmp_path / "my_notes.txt").write_text("")
  return tmp_path


def test_bash_completes_verbs_options_values_and_files(folder: pathlib.Path) -> None:
  expected = {
    "rosetta-t5 ch": "chat check",
    "rosetta-t5 infer --te": "--template",
    "rosetta-t5 bench --si": "--size",
    "rosetta-t5 plan --gpu h1": "h100 h100-pcie",
    "rosetta-t5 ckpt ver": "verify",
    "rosetta-t5 check my_r": "my_run.gin",
    "rosetta-t5 chat my_n": "my_notes.txt",
    "rosetta-t5 train --gin_file my_r": "my_run.gin",
    "rosetta-t5 convert a b --to t": "t5x t5x-legacy",
  }
  program = _BASH + "\n".join(f"complete_words {words}" for words in expected)
  done = subprocess.run(
    ["bash", "--norc", "-c", program], cwd=folder, capture_output=True, text=True, check=True
  )
  assert dict(zip(expected, map(str.strip, done.stdout.splitlines()), strict=True)) == expected


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes_verbs_options_values_and_files(folder: pathlib.Path) -> None:
  expected = {
    "rosetta-t5 comple": "rosetta-t5 completion ",
    "rosetta-t5 infer --te": "rosetta-t5 infer --template=",
    "rosetta-t5 bench --si": "rosetta-t5 bench --size=",
    "rosetta-t5 convert a b --to h": "rosetta-t5 convert a b --to hf ",
    "rosetta-t5 check my_r": "rosetta-t5 check my_run.gin ",
  }
  done = subprocess.run(
    ["zsh", "-f", "-c", _ZSH, "zsh", *expected], cwd=folder, capture_output=True, text=True
  )
  shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", done.stdout)  # without colours and movements
  for completed in expected.values():
    assert completed in shown
