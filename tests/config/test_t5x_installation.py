"""Another package called t5x is installed before this one or beside it."""

from __future__ import annotations

import sys

import pytest

from rosetta_t5.config.t5x_surface import T5X_PACKAGE, check_t5x_installation
from rosetta_t5.user_errors import ConfigError


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


def test_a_single_t5x_is_accepted_silently(site, capsys):
  check_t5x_installation()
  assert capsys.readouterr().err == ""


def test_an_earlier_folder_is_named_with_a_fix(site):
  (site / "t5x").mkdir()
  (site / "t5x/__init__.py").write_text("")
  with pytest.raises(ConfigError) as caught:
    check_t5x_installation()
  assert (
    f"`import t5x` finds {site}/t5x, or files of it, instead of this distribution's package"
    in str(caught.value)
  )
  assert f"remove {site} from PYTHONPATH" in str(caught.value)


def test_an_earlier_distribution_must_be_uninstalled(site):
  (site / "t5x").mkdir()
  (site / "t5x/__init__.py").write_text("")
  _install(site, "t5x/__init__.py")
  with pytest.raises(ConfigError, match="pip uninstall t5x && pip install --force-reinstall"):
    check_t5x_installation()


def test_a_distribution_that_has_overwritten_files_must_be_uninstalled(site):
  _install(site, str(T5X_PACKAGE / "utils.py"))
  with pytest.raises(
    ConfigError, match=r"finds .*, or files of it, instead of.*\n.*\n  pip uninstall t5x"
  ):
    check_t5x_installation()
