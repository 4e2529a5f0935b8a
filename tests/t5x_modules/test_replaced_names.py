"""Assigning to a name of `t5x` changes what `rosetta_t5` uses."""

from __future__ import annotations

import subprocess
import sys
import types
from unittest import mock

import jax.numpy as jnp
from flax.linen import partitioning as flax_partitioning
from forked_python import python

import t5x
from t5x import decoding, interactive_model, models, trainer
from t5x.examples.t5 import layers


def test_functions_are_replaced_until_they_are_restored():
  before = trainer.apply_grads
  accumulate = mock.patch("t5x.trainer.accumulate_grads_microbatched", return_value=(1, {}, None))
  with accumulate, mock.patch("t5x.trainer.apply_grads", return_value="mine"):
    assert trainer.train_with_lr(None, {}, 0.1, None, None, None) == "mine"
  assert trainer.apply_grads is before


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
  from rosetta_t5.networks.layers import norms

  class Mine(layers.LayerNorm):
    """A user's layer."""

  monkeypatch.setattr(layers, "LayerNorm", Mine)
  assert norms.LayerNorm is Mine
  monkeypatch.undo()
  assert norms.LayerNorm is not Mine


def test_private_functions_that_published_layers_use_exist():
  for module in (layers, t5x.examples.scalable_t5.layers, t5x.examples.decoder_only.layers):
    axes = module._normalize_axes(module._canonicalize_tuple(-1), 3)
    assert axes == (2,)
    assert module._convert_to_activation_function("linear")(5) == 5
    rows = module.dynamic_vector_slice_in_dim(jnp.arange(4), jnp.array([1, 3]), 1, 0)
    assert rows.tolist() == [[1], [3]]
  assert not decoding._is_tracer(1)
  args = (jnp.zeros((2, 3)), jnp.ones((2, 1)), jnp.array([0, 2]), 0)
  cache = decoding._dynamic_update_vector_slice_in_dim(*args)
  assert cache.tolist() == [[1, 0, 0], [0, 0, 1]]
  aux = ([(1, "b"), (0, "a")], {"scores": [2, 1]})
  assert interactive_model._extract_tokens_and_aux_values(aux) == (["a", "b"], {"scores": [1, 2]})


def test_modules_are_found_under_the_names_by_which_t5xs_modules_import_them():
  assert t5x.examples.t5.network.layers is layers
  assert trainer.metrics_lib is t5x.metrics
  assert models.losses is t5x.losses
