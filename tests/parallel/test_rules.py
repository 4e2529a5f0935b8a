"""The logical axis rules are T5X's."""

from __future__ import annotations

import pytest
from flax.linen import logical_to_mesh_axes

from rosetta_t5.parallel import standard_logical_axis_rules


@pytest.mark.parametrize(
  ("dims", "kernel", "activation", "table"),
  [
    # (activation dims, parameter dims): MLP kernel, activations, embedding
    ((1, 1), (None, "model"), ("data", None, None), ("model", None)),
    ((2, 1), (None, "model"), ("data", None, "model"), ("model", None)),
    ((1, 2), ("data", "model"), ("data", None, None), ("model", "data")),
    ((2, 2), ("data", "model"), ("data", None, "model"), ("model", "data")),
  ],
)
def test_logical_axes_map_to_the_mesh_axes_of_t5x(dims, kernel, activation, table):
  rules = standard_logical_axis_rules(*dims)

  def mesh_axes(*names):
    return tuple(logical_to_mesh_axes(names, rules))

  assert mesh_axes("embed", "mlp") == kernel
  assert mesh_axes("batch", "length", "embed") == activation
  assert mesh_axes("vocab", "embed") == table
  assert mesh_axes("heads", "relpos_buckets") == ("model", None)


def test_additional_rules_come_last():
  rules = standard_logical_axis_rules(additional_rules=[("experts", "data")])
  assert rules[-1] == ("experts", "data")
  assert rules[:-1] == standard_logical_axis_rules()


def test_other_numbers_of_dimensions_are_errors():
  with pytest.raises(ValueError, match="must be 1 or 2, got 1 and 3"):
    standard_logical_axis_rules(1, 3)
