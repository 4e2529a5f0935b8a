"""Which products are computed in eight bits, by which backend, and why.

Only the projections of attention and feed-forward blocks are; embedding, logits, norms, softmax and
attention's own products stay in `T5Config.dtype`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from rosetta_t5.kernels.fp8 import fp8_product
from rosetta_t5.networks.layers.dense import Product
from rosetta_t5.networks.t5_config import check_one_of

# Ada, Hopper and later have fp8 tensor cores.
_FIRST_CAPABILITY = 8.9


@dataclasses.dataclass(frozen=True)
class TransformerEngineConfig:
  """The switch of fp8 training, under the name that NVIDIA's T5X gave it.

  Transformer Engine itself is one of two backends, and not needed: XLA has fp8 products of its own.

  Attributes:
    enabled: whether to train in fp8. Unset it is so where the hardware has it, else the run warns and
      goes on in bfloat16; set to 1 on hardware without it, the run is refused.
    fp8_format: `hybrid`: e4m3 forward, e5m2 for gradients.
    recipe: `current` scales each array by its own maximum, `delayed` by those of the steps before.
    backend: `native` (XLA), `te` (Transformer Engine), or `auto`: native.
    enable_fp8: another name of `enabled`.
    emulate: whether hardware without fp8 is to compute as if it had it, slowly.
  """

  enabled: bool | int | None = None
  fp8_format: str = "hybrid"
  recipe: str = "current"
  backend: str = "auto"
  enable_fp8: bool | int | None = None
  emulate: bool | int = False

  def __post_init__(self) -> None:
    """Refuses values that are unknown, or that contradict each other."""
    for name in ("enabled", "enable_fp8", "emulate"):
      if (value := getattr(self, name)) not in (None, 0, 1):
        raise ValueError(
          f"TransformerEngineConfig.{name} = {value!r} must be True or False, or 1 or 0"
        )
    check_one_of("TransformerEngineConfig.fp8_format", self.fp8_format, ("hybrid",))
    check_one_of("TransformerEngineConfig.recipe", self.recipe, ("current", "delayed"))
    check_one_of("TransformerEngineConfig.backend", self.backend, ("auto", "native", "te"))
    given = {bool(value) for value in (self.enabled, self.enable_fp8) if value is not None}
    if len(given) > 1:
      raise ValueError(
        f"TransformerEngineConfig.enabled = {self.enabled!r} contradicts its other name, "
        f"enable_fp8 = {self.enable_fp8!r}: set one of them"
      )

  @property
  def wanted(self) -> bool | None:
    """Whether fp8 is asked for; None where that is left to the hardware."""
    given = self.enable_fp8 if self.enabled is None else self.enabled
    return None if given is None else bool(given)


@dataclasses.dataclass(frozen=True)
class Fp8Choice:
  """What was decided.

  Attributes:
    make_product: for `T5Config.make_product`; None for no fp8.
    text: one line for the run's header: what and why.
    warning: whether the user should be warned that it is not what the default is.
  """

  make_product: Callable[[], Product] | None
  text: str
  warning: bool = False


def choose_fp8(
  config: TransformerEngineConfig | Callable[[], TransformerEngineConfig] | None,
) -> Fp8Choice:
  """Returns how the projections are computed on this machine's devices.

  Args:
    config: a `TransformerEngineConfig`, or what makes one, as gin hands over; None for no fp8.

  Raises:
    ValueError: fp8 is asked for and cannot be had.
  """
  if config is not None and not isinstance(config, TransformerEngineConfig):
    config = config()
  if config is None or config.wanted is False:
    return Fp8Choice(None, "off")
  lacking = None if config.emulate else _lacking_hardware()
  if lacking and config.wanted is None:
    return Fp8Choice(None, f"off: {lacking}; running in T5Config.dtype", warning=True)
  if lacking:
    raise ValueError(
      f"te_helper.TransformerEngineConfig.enabled = 1, but {lacking}: set it to 0 (ENABLE_FP8=0 in "
      "the scripts), or emulate = True for a slow trial"
    )
  emulated = ", emulated" if _lacking_hardware() else ""
  if config.backend == "te":
    return Fp8Choice(
      _te_product_maker(config.recipe), f"Transformer Engine, {config.recipe} scaling"
    )
  why = "set" if config.backend == "native" else "auto: needs no state and no further package"
  text = f"XLA's own products, {config.recipe} scaling ({why}{emulated})"
  make_product = _current if config.recipe == "current" else DelayedProduct
  return Fp8Choice(make_product, text)


def with_fp8(model: Any, choice: Fp8Choice) -> Any:
  """Returns a copy of the model that computes its projections as chosen; `model` if there is no fp8.

  Args:
    model: a model around a linen module with a config like `T5Config`.
    choice: what `choose_fp8` returned.

  Raises:
    ValueError: the model's module has no such config.
  """
  if choice.make_product is None:
    return model
  config = model.network_config
  if not hasattr(config, "make_product"):
    raise ValueError(
      f"train.te_config_cls asks for fp8, but {type(model.module).__name__} cannot compute in it: "
      "it needs a config with a field make_product, as T5Config has; or set te_config_cls = None"
    )
  config = dataclasses.replace(config, make_product=choice.make_product)
  changed = copy.copy(model)
  changed.module = model.module.clone(config=config)
  return changed


def _lacking_hardware() -> str | None:
  """Returns what these devices lack for fp8; None if nothing."""
  device = jax.devices()[0]
  if device.platform != "gpu":
    return f"a {device.device_kind} has no fp8 (an NVIDIA GPU from Ada or Hopper on has)"
  capability = getattr(device, "compute_capability", "0.0")
  if float(capability) < _FIRST_CAPABILITY:
    return (
      f"a {device.device_kind} of compute capability {capability} has no fp8 "
      f"(from {_FIRST_CAPABILITY} on GPUs have)"
    )
  return None


def _current() -> Product:
  return fp8_product


class DelayedProduct(nn.Module):
  """The product in fp8 whose scales come from the maxima of the last 1024 steps.

  They are variables whose gradient is their next value (`_overwrite_with_gradient`). Where they are
  not given, as in evaluation, each array is scaled by its own maximum.
  """

  @nn.compact
  def __call__(self, x_NI: jax.Array, w_IO: jax.Array) -> jax.Array:
    """Returns x·w over the last dimension of x and the first of w."""
    if not self.is_initializing() and OVERWRITE_WITH_GRADIENT not in self.variables:
      return fp8_product(x_NI, w_IO)
    op = nn.Fp8DirectDotGeneralOp(name="fp8")
    return op(x_NI, w_IO, _sums_over_last_and_first(x_NI))


def _sums_over_last_and_first(x_NI: jax.Array) -> tuple:
  return (((x_NI.ndim - 1,), (0,)), ((), ()))


def _te_product_maker(recipe: str) -> Callable[[], Product]:
  if importlib.util.find_spec("transformer_engine") is None:
    raise ValueError(
      "te_helper.TransformerEngineConfig.backend = 'te', but Transformer Engine is not installed: "
      "set backend = 'native', or pip install transformer-engine[jax] (it builds with CUDA)"
    )
  from transformer_engine.common import recipe as recipes
  from transformer_engine.jax.flax import make_dot_general_cls

  make_recipe = recipes.Float8CurrentScaling if recipe == "current" else recipes.DelayedScaling
  return functools.partial(_te_product, make_dot_general_cls(make_recipe()))


def _te_product(dot_general_cls: Callable[[], Callable[..., jax.Array]]) -> Product:
  dot_general = dot_general_cls()
  return lambda x_NI, w_IO: dot_general(x_NI, w_IO, _sums_over_last_and_first(x_NI))
