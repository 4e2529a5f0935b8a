"""T5X's `adafactor`: the optimizer of T5 and its factorization rules."""

from rosetta_t5.training.optimizers.adafactor import Adafactor
from rosetta_t5.training.optimizers.adafactor import AdafactorParamState as _AdafactorParamState
from rosetta_t5.training.optimizers.factor_rules import *
from rosetta_t5.training.optimizers.optimizer_def import HyperParams as _AdafactorHyperParams
