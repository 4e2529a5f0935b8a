"""Another package called t5x, before this one's or beside it."""

from __future__ import annotations

import sys

import pytest

from rosetta_t5.config.checks.t5x_installation import OURS, check_which_t5x
from rosetta_t5.config.errors import ConfigError


@pytest.fixture
def site(tmp_path, monkeypatch):
  """A folder at the head of sys.path."""
  monkeypatch.delitem(sys.modules, "t5x", raising=False)
  monkeypatch.syspath_prepend(tmp_path)
  return tmp_path


def _install(site, record: str) -> None:
  folder = site / "t5x-1.2.dist-info"
  folder.mkdir()
  (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: t5x\nVersion: 1.2\n")
  (folder / "RECORD").write_text(f"{record},,\n")


def test_ours_alone_is_well(site, capsys):
  check_which_t5x()
  assert capsys.readouterr().err == ""


def test_a_folder_before_ours_is_named_with_what_to_do(site):
  (site / "t5x").mkdir()
  (site / "t5x/__init__.py").write_text("")
  with pytest.raises(ConfigError) as said:
    check_which_t5x()
  assert f"finds another package than this one's: {site}/t5x" in str(said.value)
  assert f"take {site} out of PYTHONPATH" in str(said.value)


def test_a_distribution_before_ours_is_to_be_uninstalled(site):
  (site / "t5x").mkdir()
  (site / "t5x/__init__.py").write_text("")
  _install(site, "t5x/__init__.py")
  with pytest.raises(ConfigError, match="pip uninstall t5x && pip install --force-reinstall"):
    check_which_t5x()


def test_a_distribution_that_wrote_over_ours_is_to_be_uninstalled(site):
  _install(site, str(OURS / "utils.py"))
  with pytest.raises(ConfigError, match=r"t5x 1\.2 has written its files over this one's"):
    check_which_t5x()


def test_a_distribution_behind_ours_is_only_noted(site, capsys):
  _install(site, "elsewhere/t5x/utils.py")
  check_which_t5x()
  said = capsys.readouterr().err
  assert "note: t5x 1.2 is installed too; `import t5x` finds this package's" in said
  assert "pip uninstall t5x" in said
