"""T5X's `optimizers`: the interface of an optimizer, and the optimizers of optax and of gin/optimizers."""

from rosetta_t5.training.optimizers.composite import MultiOptimizer, SpikeGuard
from rosetta_t5.training.optimizers.matrices import shampoo, soap
from rosetta_t5.training.optimizers.optax_wrapper import *
from rosetta_t5.training.optimizers.optimizer_def import *
from rosetta_t5.training.optimizers.transformations import *
