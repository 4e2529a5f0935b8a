"""T5X's `adafactor`: the optimizer of T5 and its factorization rules."""

from typing import Any

from rosetta_t5.training.optimizers.adafactor import Adafactor
from rosetta_t5.training.optimizers.adafactor import AdafactorParamState as _AdafactorParamState
from rosetta_t5.training.optimizers.factor_rules import *


def _AdafactorHyperParams(*values: Any, **named_values: Any) -> Any:
  return Adafactor(*values, **named_values).hyper_params
