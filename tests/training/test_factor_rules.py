"""How factor rules are resolved to dimensions, and their errors."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from flax.core import freeze
from jax.sharding import PartitionSpec as P

from rosetta_t5.training.optimizers import factor_rules
from rosetta_t5.training.optimizers.adafactor import Adafactor
from rosetta_t5.training.optimizers.factor_rules import (
  HEURISTIC_RULE,
  FactorDim,
  FactorDims,
  HParamMap,
  resolve,
)

NONE, BATCH, ROW, COL = FactorDim.NONE, FactorDim.BATCH, FactorDim.ROW, FactorDim.COLUMN
STANDARD = factor_rules.standard_logical_factor_rules()


@pytest.mark.parametrize(
  ("rule", "shape", "want"),
  [
    (HEURISTIC_RULE, (128, 256), FactorDims((0, 1), (0,), (1,))),
    (HEURISTIC_RULE, (256, 128), FactorDims((0, 1), (1,), (0,))),
    (HEURISTIC_RULE, (128, 128), FactorDims((0, 1), (0,), (1,))),
    (HEURISTIC_RULE, (127, 256), FactorDims((0, 1))),
    (HEURISTIC_RULE, (256,), FactorDims((0,))),
    (HEURISTIC_RULE, (), FactorDims(())),
    (None, (256, 256), FactorDims((0, 1))),
    # A rule for a plain matrix gives way to the sizes.
    ((COL, ROW), (128, 256), FactorDims((0, 1), (0,), (1,))),
    ((NONE, NONE), (128, 256), FactorDims((0, 1), (0,), (1,))),
    ((ROW, COL), (8, 8), FactorDims((0, 1))),
    # With a stack the rule decides, whatever the sizes.
    ((BATCH, ROW, COL), (3, 2, 2), FactorDims((1, 2), (1,), (2,))),
    ((ROW, BATCH, COL, COL), (2, 3, 2, 2), FactorDims((0, 2, 3), (0,), (2, 3))),
    ((BATCH, ROW), (3, 512), FactorDims((1,))),
    ((BATCH, BATCH, NONE), (3, 2, 512), FactorDims((2,))),
    (("row", "column", "col"), (4, 4, 4), FactorDims((0, 1, 2), (0,), (1, 2))),
  ],
)
def test_rules_resolve_to_dimensions(rule, shape, want):
  assert resolve(rule, shape, "w", min_dim_size=128) == want


def test_rule_without_a_column_does_not_factor():
  rules = factor_rules.rules_from_axes(
    {"a": P("embed"), "b": P("layers", "mlp", "heads")}, STANDARD
  )
  assert rules == {"a": (NONE,), "b": (BATCH, NONE, NONE)}


def test_rules_by_axis_name_cover_nested_and_frozen_parameters():
  axes = freeze({"enc": {"mlp": {"wi": P("layers", "embed", "mlp")}}})
  assert factor_rules.rules_from_axes(axes, STANDARD) == {"enc/mlp/wi": (BATCH, ROW, COL)}


def test_roles_can_be_strings():
  assert factor_rules.factor_name_to_factordim("Column") is COL
  assert factor_rules.factor_name_to_factordim("unfactorized") is NONE
  assert factor_rules.factor_name_to_factordim(ROW) is ROW
  rules = factor_rules.rules_from_axes(
    {"w": P("x", "y", "z")}, {"x": "row", "y": "col", "z": "col"}
  )
  assert rules == {"w": (ROW, COL, COL)}


def test_hparam_map_uses_the_first_expression_that_is_found():
  values = HParamMap([("kernel$", 1), ("encoder", 2)])
  assert values({"encoder": {"kernel": 0, "scale": 0}}) == {"encoder": {"kernel": 1, "scale": 2}}
  with pytest.raises(KeyError, match=r"no rule .* matches parameter 'decoder/scale'"):
    values["decoder/scale"]


@pytest.mark.parametrize(
  ("axes", "message"),
  [
    (P("embed", "hedas"), r"no role for axis 'hedas' of parameter 'w' \(did you mean 'heads'"),
    (P("embed", "mlp", "relpos_buckets"), r"'w' .*a row, a column and an axis with the role none"),
  ],
)
def test_error_names_the_axis_without_a_role(axes, message):
  with pytest.raises(ValueError, match=message):
    factor_rules.rules_from_axes({"w": axes}, STANDARD)


def test_high_ranks_need_a_rule():
  with pytest.raises(
    ValueError, match=r"'qkv' of shape \(2, 3, 4\).*logical_factor_rules = @adafactor"
  ):
    Adafactor().init_state({"qkv": jnp.ones((2, 3, 4))})


def test_rule_must_have_the_rank_of_the_parameter():
  optimizer = Adafactor(factor_map=HParamMap([(".*", (ROW, COL))]))
  with pytest.raises(ValueError, match=r"has 2 dimensions, but parameter 'w' has"):
    optimizer.init_state({"w": jnp.ones((2, 3, 4))})


def test_error_names_the_unknown_role():
  with pytest.raises(
    ValueError, match=r"unknown factor role 'rwo': it must be one of none, batch, row"
  ):
    factor_rules.factor_name_to_factordim("rwo")
