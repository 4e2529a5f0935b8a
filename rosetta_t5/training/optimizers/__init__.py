"""Optimizers with T5X's interface: its Adafactor, and every optimizer of optax."""

from rosetta_t5.training.optimizers.adafactor import Adafactor, AdafactorParamState
from rosetta_t5.training.optimizers.base import (
  Optimizer,
  OptimizerDef,
  OptimizerDefType,
  OptimizerState,
  OptimizerStateType,
  OptimizerType,
)
from rosetta_t5.training.optimizers.factor_rules import (
  HEURISTIC_RULE,
  FactorDim,
  FactorRule,
  HeuristicRule,
  HParamMap,
  factor_name_to_factordim,
  standard_logical_factor_rules,
)
from rosetta_t5.training.optimizers.multi import MultiOptimizer
from rosetta_t5.training.optimizers.optax_wrapper import (
  OptaxStatePartitionRules,
  OptaxWrapper,
  adabelief,
  adagrad,
  adam,
  adamw,
  amos,
  chain,
  dpsgd,
  fromage,
  lamb,
  lars,
  lion,
  noisy_sgd,
  radam,
  rmsprop,
  sgd,
  wrap_optax_optimizer,
  yogi,
)
