"""T5X's `optimizers`: the interface of an optimizer, and the optimizers of optax and of gin/optimizers."""

from rosetta_t5.training.optimizers.averages import average_parameters
from rosetta_t5.training.optimizers.by_name import all_except, scale_by_name
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
from rosetta_t5.training.optimizers.second_order.kfac import precondition_by_kfac
from rosetta_t5.training.optimizers.second_order.muon import muon
from rosetta_t5.training.optimizers.second_order.shampoo import shampoo
from rosetta_t5.training.optimizers.second_order.soap import soap
from rosetta_t5.training.optimizers.second_order.sophia import sophia
