"""T5X's `adafactor`: the optimizer of T5 and its factorization rules."""

from rosetta_t5.training.optimizers import (
  HEURISTIC_RULE,
  Adafactor,
  FactorDim,
  FactorRule,
  HeuristicRule,
  HParamMap,
  factor_name_to_factordim,
  standard_logical_factor_rules,
)
