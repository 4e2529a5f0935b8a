"""The methods of `rosetta-t5 finetune`: what each trains, with which optimizer and learning rate."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, NamedTuple

from rosetta_t5.cli.finetune.choices import Choice, Code

RATE = "utils.create_learning_rate_scheduler.base_learning_rate"
_FACTORS, _WARMUP = (
  f"utils.create_learning_rate_scheduler.{x}" for x in ("factors", "warmup_steps")
)
_WARMUP_SHARE = 0.06  # of the steps, as T-Few (arXiv:2205.05638)
_RANK = 16  # of LoRA, where it is chosen because full finetuning does not fit
_FROZEN = {
  None: "",
  "bfloat16": "float32 does not fit, so the frozen parameters are in bfloat16",
  "int8": "bfloat16 does not fit, so the frozen kernels are in int8, which costs accuracy",
}


class Optimizer(NamedTuple):
  """An optimizer: lines of gin, and bindings that come after them."""

  lines: str
  bindings: Mapping[str, Any]


_ADAMW = Optimizer("include 'gin/optimizers/adamw.gin'", {"optax.adamw.weight_decay": 0.0})
# Lester et al. 2021, and T5X's prompt tuning.
_PROMPTS = Optimizer(
  "from t5x import adafactor\nOPTIMIZER = @adafactor.Adafactor()",
  {
    "adafactor.Adafactor.decay_rate": 0.8,
    "adafactor.Adafactor.multiply_by_parameter_scale": False,
    "adafactor.Adafactor.weight_decay_rate": 1e-5,
    "adafactor.Adafactor.logical_factor_rules": Code("@adafactor.standard_logical_factor_rules()"),
  },
)


class Method(NamedTuple):
  """A method.

  Attributes:
    help: what it trains.
    rate: its learning rate.
    why: why this is its rate.
    adapter: the class of `adapters`; "" for none.
    argument: the argument of that class which is the option's value; "" if the option has none.
    more: other arguments of that class.
    optimizer: the optimizer; None for that of the model.
  """

  help: str
  rate: float
  why: str
  adapter: str = ""
  argument: str = ""
  more: Mapping[str, Any] = {}
  optimizer: Optimizer | None = _ADAMW

  @property
  def option(self) -> Mapping[str, Any]:
    """The arguments of `add_argument`."""
    name = f"adapters.{self.adapter}" if self.adapter else "train_script.train"
    text = f"{self.help} ({name}{'.' * bool(self.argument)}{self.argument})"
    if not self.argument:
      return {"action": "store_true", "help": text}
    from rosetta_t5.terminal import positive_integer

    return {"type": positive_integer, "metavar": self.argument.upper(), "help": text}


METHODS = {
  "full": Method("train all parameters", 1e-3, "T5's, for Adafactor", optimizer=None),
  "lora": Method(
    "two small matrices beside kernels", 5e-4, "ten times AdamW's for all", "LoRA", "rank"
  ),
  "dora": Method(
    "LoRA, and the norms of columns", 5e-4, "as for LoRA", "LoRA", "rank", {"dora": True}
  ),
  "ia3": Method("scales of keys, values and hidden layers", 3e-3, "as T-Few", "IA3"),
  "prompt": Method(
    "vectors before the inputs", 0.3, "Lester's", "PromptTuning", "length", {}, _PROMPTS
  ),
  "bitfit": Method("biases, which T5 does not have", 1e-3, "few and small values", "BitFit"),
  "norms": Method("scales of the layer norms", 1e-3, "few and small values", "Norms"),
}


class Candidate(NamedTuple):
  """A method that may fit the memory.

  Attributes:
    name: a key of METHODS.
    value: the value of its option.
    frozen_dtype: the dtype of frozen parameters.
    reason: why it is tried.
  """

  name: str
  value: Any
  frozen_dtype: str | None
  reason: str

  @property
  def lines(self) -> str:
    """The lines of gin that come before its choices."""
    optimizer = METHODS[self.name].optimizer
    adapters = "\nfrom rosetta_t5 import adapters" if self.name != "full" else ""
    return (optimizer.lines if optimizer else "") + adapters

  def choices(self, model: Any, steps: int, rate: float | None) -> list[Choice]:
    """Returns the bindings of the method.

    Args:
      model: the model, whose own optimizer may not be Adafactor.
      steps: the number of steps.
      rate: the learning rate that the user wants.
    """
    method, name = METHODS[self.name], f"models.{type(model).__name__}"
    value, why = method.rate, method.why
    if method.optimizer is None:
      optimizer = type(model.optimizer_def).__name__
      if optimizer != "Adafactor":
        value, why = 1e-4, f"for the run's own optimizer, {optimizer}"
      return [Choice(RATE, rate or value, "" if rate else f"{why}; {self.reason}")]
    adapter = f"adapters.{method.adapter}"
    arguments = {**({method.argument: self.value} if method.argument else {}), **method.more}
    warmup = max(1, round(_WARMUP_SHARE * steps))
    found = [
      Choice(f"{name}.adapter", Code(f"@{adapter}()"), self.reason),
      *(Choice(f"{adapter}.{argument}", x, "") for argument, x in arguments.items()),
      Choice(f"{adapter}.frozen_dtype", self.frozen_dtype, _FROZEN[self.frozen_dtype]),
      Choice(f"{name}.optimizer_def", Code("%OPTIMIZER"), ""),
      *(Choice(binding, x, "") for binding, x in method.optimizer.bindings.items()),
      Choice(RATE, rate or value, "" if rate else why),
    ]
    if method.optimizer is _ADAMW:
      found.append(Choice(_FACTORS, "constant * linear_warmup", ""))
      found.append(Choice(_WARMUP, warmup, f"{_WARMUP_SHARE:.0%} of the steps"))
    return found


def candidates(options: argparse.Namespace) -> list[Candidate]:
  """Returns the methods to try, the one that is preferred first."""
  given = next((name for name in METHODS if getattr(options, name)), None)
  if given == "full":
    return [Candidate("full", None, None, "all parameters are trained")]
  value = getattr(options, given) if given else _RANK
  why = "" if given else "chosen because full finetuning does not fit the memory"
  found = [Candidate(given or "lora", value, dtype, why) for dtype in _FROZEN]
  if given:
    return found
  return [
    Candidate("full", None, None, "all parameters are trained, which fits the memory"),
    *found,
  ]
