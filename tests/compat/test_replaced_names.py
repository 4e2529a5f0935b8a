"""Assigning to a name of `t5x` changes what `rosetta_t5` uses."""

from __future__ import annotations

import subprocess
import sys
import types
from unittest import mock

from flax.linen import partitioning as flax_partitioning
from forked_python import python

from rosetta_t5.compat import trainer_functions
from t5x import models, trainer
from t5x.examples.t5 import layers


def test_functions_are_replaced_until_they_are_restored():
  before = trainer.apply_grads
  accumulate = mock.patch("t5x.trainer.accumulate_grads_microbatched", return_value=(1, {}, None))
  with accumulate, mock.patch("t5x.trainer.apply_grads", return_value="mine"):
    assert trainer.train_with_lr(None, {}, 0.1, None, None, None) == "mine"
  assert trainer_functions.apply_grads is trainer.apply_grads is before


def test_a_module_that_is_imported_meanwhile_gets_the_original_back(monkeypatch):
  before = trainer.apply_grads
  late = types.ModuleType("rosetta_t5.imported_late")
  monkeypatch.setitem(sys.modules, late.__name__, late)
  with mock.patch("t5x.trainer.apply_grads") as mine:
    late.apply_grads = mine
  assert late.apply_grads is before


def test_modules_have_the_names_that_t5x_imports_and_no_others():
  assert layers.param_with_axes is flax_partitioning.param_with_axes
  assert hasattr(models, "PyTreeDef")
  assert not hasattr(models, "PyTreeDefs")


def test_submodules_need_no_import():
  program = """
import sys
assert not any(name.partition(".")[0] == "t5x" for name in sys.modules)
import t5x
print(t5x.losses.__name__, hasattr(t5x, "nothing"), t5x.__version__[0])
"""
  out = subprocess.run([python(), "-c", program], capture_output=True, text=True, check=True)
  assert out.stdout.split() == ["t5x.losses", "False", "0"]


def test_a_class_is_replaced_where_networks_use_it(monkeypatch):
  from rosetta_t5.networks import t5

  class Mine(layers.LayerNorm):
    """A user's layer."""

  monkeypatch.setattr(layers, "LayerNorm", Mine)
  assert t5.LayerNorm is Mine
  monkeypatch.undo()
  assert t5.LayerNorm is not Mine
