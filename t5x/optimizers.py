"""T5X's `optimizers`: the interface of an optimizer, and the optimizers of optax and of gin/optimizers."""

from rosetta_t5.training.optimizers.composite import MultiOptimizer, SpikeGuard
from rosetta_t5.training.optimizers.curvature import precondition_by_kfac, sophia
from rosetta_t5.training.optimizers.matrices import shampoo, soap
from rosetta_t5.training.optimizers.optax_wrapper import (
  OptaxStatePartitionRules,
  OptaxWrapper,
  adabelief,
  adagrad,
  adam,
  adamw,
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
from rosetta_t5.training.optimizers.transformations import (
  all_except,
  average_parameters,
  muon,
  scale_by_name,
)
