"""fp8 training: which matmuls are computed in fp8, and by which backend.

These are the projections of attention and feed-forward blocks. The embedding, logits, norms, softmax
and attention's own matmuls are computed in `T5Config.dtype`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from rosetta_t5.argument_types import check_one_of
from rosetta_t5.kernels.fp8 import fp8_matmul
from rosetta_t5.networks.expert_settings import has_experts
from rosetta_t5.networks.kernel_measurement import KernelChoice, kernel_of
from rosetta_t5.networks.layers.matmuls import Axes, Matmul
from rosetta_t5.networks.other_networks import setting_of
from rosetta_t5.parallel.placement import dividing_axes
from rosetta_t5.traced.program import with_config

# Ada, Hopper and later have fp8 tensor cores.
_FIRST_CAPABILITY = 8.9


@dataclasses.dataclass(frozen=True)
class TransformerEngineConfig:
  """The settings of fp8 training, with the name that NVIDIA's T5X gave them.

  Transformer Engine is only one of two backends and is not required: XLA has fp8 matmuls of its own.

  Attributes:
    enabled: whether to train in fp8. None enables fp8 if the hardware supports it; otherwise the run
      warns and uses `T5Config.dtype`. True raises an error if the hardware does not support fp8.
    fp8_format: `hybrid`: e4m3 in the forward pass, e5m2 for gradients.
    recipe: `current` scales each array by its own maximum, `delayed` by the maxima of earlier steps.
    backend: `native` (XLA), `te` (Transformer Engine), or `auto`, which is native.
    enable_fp8: another name for `enabled`.
    emulate: whether hardware without fp8 emulates it, slowly.
  """

  enabled: bool | int | None = None
  fp8_format: str = "hybrid"
  recipe: str = "current"
  backend: str = "auto"
  enable_fp8: bool | int | None = None
  emulate: bool | int = False

  def __post_init__(self) -> None:
    """Refuses unknown values and values that contradict each other."""
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
  def requested(self) -> bool | None:
    """Whether fp8 is requested; None if the hardware decides."""
    given = self.enable_fp8 if self.enabled is None else self.enabled
    return None if given is None else bool(given)


@dataclasses.dataclass(frozen=True)
class Fp8Choice:
  """The decision whether and how a run computes in fp8.

  Attributes:
    matmul: the value for `T5Config.matmul`; None if fp8 is off.
    text: the decision and its reason, one line for the run's header.
  """

  matmul: Matmul | None
  text: str


def choose_fp8(
  config: TransformerEngineConfig | Callable[[], TransformerEngineConfig] | None, device: Any = None
) -> Fp8Choice:
  """Returns how the projections are computed.

  Args:
    config: a `TransformerEngineConfig`, or a function that returns one, as from gin; None for no fp8.
    device: the kind of device that the program is compiled for; None for this machine's.

  Raises:
    ValueError: fp8 is requested but not available.
  """
  if config is not None and not isinstance(config, TransformerEngineConfig):
    config = config()
  if config is None or config.requested is False:
    return Fp8Choice(None, "off")
  problem = _missing_hardware_support(device or jax.devices()[0])
  if problem and not config.emulate:
    if config.requested is None:
      return Fp8Choice(None, f"off: {problem}; running in T5Config.dtype")
    raise ValueError(
      f"te_helper.TransformerEngineConfig.enabled = 1, but {problem}: set it to 0 (ENABLE_FP8=0 in "
      "the scripts), or emulate = True for a slow trial"
    )
  if config.backend == "te":
    matmul = _transformer_engine_matmul(config.recipe)
    return Fp8Choice(matmul, f"Transformer Engine, {config.recipe} scaling")
  reason = "set" if config.backend == "native" else "auto: needs no state and no further package"
  emulated = ", emulated" if problem else ""
  text = f"XLA's own matmuls, {config.recipe} scaling ({reason}{emulated})"
  return Fp8Choice(_MATMULS[config.recipe], text)


def with_fp8(model: Any, choice: Fp8Choice) -> Any:
  """Returns a copy of the model that computes its projections as chosen; `model` if fp8 is off.

  Args:
    model: a model around a linen module with a config like `T5Config`.
    choice: the result of `choose_fp8`.

  Raises:
    ValueError: the model's module has no such config.
  """
  if choice.matmul is None:
    return model
  config = model.network_config
  if not hasattr(config, "matmul"):
    raise ValueError(
      f"train.te_config_cls requests fp8, but {type(model.module).__name__} does not support it: "
      "its config needs a field matmul, like T5Config; or set te_config_cls = None"
    )
  if has_experts(config) and choice.matmul not in _MATMULS.values():
    raise ValueError(
      "te_helper.TransformerEngineConfig.backend = 'te' does not compute the experts of "
      f"{type(config).__name__}.num_experts = {config.num_experts}: set backend = 'native'"
    )
  return with_config(model, matmul=choice.matmul)


def _missing_hardware_support(device: Any) -> str | None:
  """Returns why a kind of device does not support fp8; None if it does."""
  capability = float(getattr(device, "compute_capability", 0)) if device.platform == "gpu" else 0
  if capability >= _FIRST_CAPABILITY:
    return None
  return f"a {device.device_kind} has no fp8 (NVIDIA GPUs have it from Ada and Hopper on)"


def _current_scaling_matmul(
  module: nn.Module, x_NI: jax.Array, w_IO: jax.Array, axes: Axes
) -> jax.Array:
  """Returns x·w in fp8; each device's part of an operand is scaled separately."""
  del module
  return fp8_matmul(x_NI, w_IO, dividing_axes(axes, x_NI.shape + w_IO.shape[1:]))


_MATMULS: dict[str, Matmul] = {
  "current": _current_scaling_matmul,
  # The name is part of the variables' paths in checkpoints.
  "delayed": lambda _, x_NI, w_IO, axes: DelayedScaling(name="DelayedProduct_0")(x_NI, w_IO, axes),
}


class DelayedScaling(nn.Module):
  """The matmul in fp8 whose scales come from the maxima of the last 1024 steps.

  The maxima are variables whose gradient is their next value (`_overwrite_with_gradient`). Without
  these variables, as in evaluation, each array is scaled by its own maximum.
  """

  @nn.compact
  def __call__(self, x_NI: jax.Array, w_IO: jax.Array, axes: Axes) -> jax.Array:
    """Returns x·w over the last dimension of x and the first of w."""
    if not self.is_initializing() and OVERWRITE_WITH_GRADIENT not in self.variables:
      return _current_scaling_matmul(self, x_NI, w_IO, axes)
    return nn.Fp8DirectDotGeneralOp(name="fp8")(x_NI, w_IO, _dimension_numbers(x_NI))


def _dimension_numbers(x_NI: jax.Array) -> tuple:
  return (((x_NI.ndim - 1,), (0,)), ((), ()))


def _transformer_engine_matmul(recipe: str) -> Matmul:
  """Returns Transformer Engine's matmul."""
  if importlib.util.find_spec("transformer_engine") is None:
    raise ValueError(
      "te_helper.TransformerEngineConfig.backend = 'te', but Transformer Engine is not installed: "
      "set backend = 'native', or pip install transformer-engine[jax] (it builds with CUDA)"
    )
  from transformer_engine.common import recipe as recipes
  from transformer_engine.jax.flax import make_dot_general_cls

  make_recipe = recipes.Float8CurrentScaling if recipe == "current" else recipes.DelayedScaling
  dot_general_cls = make_dot_general_cls(make_recipe())
  return lambda module, x_NI, w_IO, axes: dot_general_cls()(x_NI, w_IO, _dimension_numbers(x_NI))


def describe_computation(
  model: Any, fp8: Fp8Choice, measured: KernelChoice | None = None
) -> str | None:
  """Returns one line: the activations' type, fp8, the attention kernel and the settings in use.

  Args:
    model: the model; the result is None unless its module has a config like `T5Config`.
    fp8: the result of `choose_fp8`.
    measured: the attention kernel and the reason, if the run has measured the kernels.
  """
  config = model.network_config
  if not hasattr(config, "dtype"):
    return None
  kernel = measured or kernel_of(config)
  parts = [jnp.dtype(config.dtype).name, f"fp8 {fp8.text}"]
  parts.append(f"attention by {kernel.name} ({kernel.reason})")
  if setting_of(config, "fuse_qkv_params"):
    parts.append("fused qkv")
  if setting_of(config, "transpose_batch_sequence"):
    parts.append("length before batch")
  policy = setting_of(config, "remat_policy")
  if policy not in ("none", None):
    parts.append(f"remat {policy}")
  return "; ".join(parts)
