"""The methods of `rosetta-t5 finetune`: what each trains, with which optimizer and learning rate."""

import argparse
from collections.abc import Mapping
from typing import Any, NamedTuple

from rosetta_t5.cli.finetune.choices import Choice, Code

_SCHEDULE = "utils.create_learning_rate_scheduler"
RATE = f"{_SCHEDULE}.base_learning_rate"
_WARMUP_SHARE = 0.06  # of the steps, as T-Few (arXiv:2205.05638)
_RANK = 16  # of LoRA, where it is chosen because full finetuning does not fit
_FROZEN = {
  None: "",
  "bfloat16": "float32 does not fit, so the frozen parameters are in bfloat16",
  "int8": "bfloat16 does not fit, so the frozen kernels are in int8, which costs accuracy",
}
_ADAMW = f"""include 'gin/optimizers/adamw.gin'
optax.adamw.weight_decay = 0.0
{_SCHEDULE}.factors = 'constant * linear_warmup'"""
# Lester et al. 2021, and T5X's prompt tuning.
_ADAFACTOR = """from t5x import adafactor
OPTIMIZER = @adafactor.Adafactor()
adafactor.Adafactor.decay_rate = 0.8
adafactor.Adafactor.multiply_by_parameter_scale = False
adafactor.Adafactor.weight_decay_rate = 1e-5
adafactor.Adafactor.logical_factor_rules = @adafactor.standard_logical_factor_rules()"""


class Method(NamedTuple):
  """A method.

  Attributes:
    help: what it trains, and in brackets the gin binding.
    rate: its learning rate.
    why: why this is its rate.
    adapter: the class of `adapters`; "" for none.
    argument: the argument of that class which is the option's value; "" if the option has none.
    more: other arguments of that class.
    optimizer: the lines of gin that set the optimizer of an adapter.
  """

  help: str
  rate: float
  why: str
  adapter: str = ""
  argument: str = ""
  more: Mapping[str, Any] = {}
  optimizer: str = _ADAMW


_PROMPT = "vectors before the inputs (adapters.PromptTuning.length)"
_IA3 = "scales of keys, values and hidden layers (adapters.IA3)"
_LORA = "two small matrices beside kernels (adapters.LoRA.rank)"
_DORA = "LoRA, and the norms of columns (adapters.LoRA.rank)"
METHODS = {
  "full": Method("train all parameters (train_script.train)", 1e-3, "T5's, for Adafactor"),
  "lora": Method(_LORA, 5e-4, "ten times AdamW's for all", "LoRA", "rank"),
  "dora": Method(_DORA, 5e-4, "as for LoRA", "LoRA", "rank", {"dora": True}),
  "ia3": Method(_IA3, 3e-3, "as T-Few", "IA3"),
  "prompt": Method(_PROMPT, 0.3, "Lester's", "PromptTuning", "length", optimizer=_ADAFACTOR),
  "bitfit": Method("biases; T5 has none (adapters.BitFit)", 1e-3, "few, small values", "BitFit"),
  "norms": Method("scales of layer norms (adapters.Norms)", 1e-3, "few, small values", "Norms"),
}


class Candidate(NamedTuple):
  """A method that may fit the memory: its name, the dtype of frozen parameters, and why it is tried."""

  name: str
  frozen_dtype: str | None
  reason: str


def candidates(options: argparse.Namespace) -> list[Candidate]:
  """Returns the methods to try, the one that is preferred first."""
  given = next((name for name in METHODS if getattr(options, name)), None)
  fits = "" if given else ", which fits the memory"
  full = Candidate("full", None, f"all parameters are trained{fits}")
  if given == "full":
    return [full]
  why = "" if given else "chosen because full finetuning does not fit the memory"
  adapters = [Candidate(given or "lora", dtype, why) for dtype in _FROZEN]
  return adapters if given else [full, *adapters]


def method_lines(
  candidate: Candidate, options: argparse.Namespace, model: Any, steps: int
) -> list[str]:
  """Returns the lines of gin of a method.

  Args:
    candidate: the method.
    options: the values of the command's arguments.
    model: the model, whose own optimizer may not be Adafactor.
    steps: the number of steps.
  """
  method, name = METHODS[candidate.name], f"models.{type(model).__name__}"
  rate, why = method.rate, method.why
  if not method.adapter:
    if (optimizer := type(model.optimizer_def).__name__) != "Adafactor":
      rate, why = 1e-4, f"for the run's own optimizer, {optimizer}"
    why = f"{why}; {candidate.reason}"
  chosen = Choice(RATE, options.learning_rate or rate, "" if options.learning_rate else why)
  if not method.adapter:
    return [str(chosen)]
  adapter, dtype = f"adapters.{method.adapter}", candidate.frozen_dtype
  given = {method.argument: getattr(options, candidate.name) or _RANK} if method.argument else {}
  warmup = max(1, round(_WARMUP_SHARE * steps))
  share = f"{_WARMUP_SHARE:.0%} of the steps"
  found = [
    Choice(f"{name}.adapter", Code(f"@{adapter}()"), candidate.reason),
    *(Choice(f"{adapter}.{argument}", x) for argument, x in {**given, **method.more}.items()),
    Choice(f"{adapter}.frozen_dtype", dtype, _FROZEN[dtype]),
    Choice(f"{name}.optimizer_def", Code("%OPTIMIZER")),
    chosen,
    *([Choice(f"{_SCHEDULE}.warmup_steps", warmup, share)] if method.optimizer is _ADAMW else []),
  ]
  return ["from rosetta_t5 import adapters", method.optimizer, *map(str, found)]
