"""T5X's `optimizers`: the interface of an optimizer, and the optimizers of optax and of gin/optimizers."""

from rosetta_t5.training.optimizers.guards import SpikeGuard
from rosetta_t5.training.optimizers.multi import MultiOptimizer
from rosetta_t5.training.optimizers.optax_wrapper import (
  OptaxStatePartitionRules,
  OptaxWrapper,
  adabelief,
  adagrad,
  adam,
  adamw,
  amos,
  average_parameters,
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
from rosetta_t5.training.optimizers.optimizer_def import (
  Optimizer,
  OptimizerDef,
  OptimizerDefType,
  OptimizerState,
  OptimizerStateType,
  OptimizerType,
)
from rosetta_t5.training.optimizers.param_paths import all_except, scale_by_name
from rosetta_t5.training.optimizers.second_order.kfac import precondition_by_kfac
from rosetta_t5.training.optimizers.second_order.matrices import muon
from rosetta_t5.training.optimizers.second_order.shampoo import shampoo, soap
from rosetta_t5.training.optimizers.second_order.sophia import sophia
