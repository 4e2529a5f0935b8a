"""LoRA, DoRA and (IA)³, which change the kernels of projections."""

from __future__ import annotations

import dataclasses
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from rosetta_t5.adapters.adapter import Adapter, Flat, is_kernel
from rosetta_t5.argument_types import Positive, PositiveNumber, Rate
from rosetta_t5.networks.layers.adapted_kernels import AdaptedKernel

Targets = Sequence[str] | str

ALL_LINEAR = "all-linear"
_MATRICES = {"q": "query", "k": "key", "v": "value", "o": "out"}
# Transformers' names of parts of a network, and this project's.
_OUR_NAMES = {
  **_MATRICES,
  **{f"{letter}_proj": name for letter, name in _MATRICES.items()},
  "gate_proj": "wi_0",
  "up_proj": "wi_1",
  "down_proj": "wo",
  "c_attn": "(query|key|value)",
  "c_proj": "(out|wo)",
  "c_fc": "wi",
  "SelfAttention": "(self_)?attention",
  "self_attn": "(self_)?attention",
  "EncDecAttention": "encoder_decoder_attention",
  "DenseReluDense": "mlp",
}


def matches(targets: Targets, module: str) -> bool:
  """Returns whether a projection is one of the targets.

  Args:
    targets: the last parts of names, such as ('query', 'mlp/wo'), by this project's names or
      Transformers'; a regular expression of whole names; or 'all-linear' for all but the output layer.
    module: the projection's name, such as encoder/layers_0/attention/query.
  """
  if targets == ALL_LINEAR:
    return not module.endswith("logits_dense")
  if isinstance(targets, str):
    return re.fullmatch(targets, module) is not None
  return any(re.fullmatch(f"(.*/)?{_as_pattern(target)}", module) for target in targets)


def _as_pattern(target: str) -> str:
  parts = target.replace(".", "/").split("/")
  return "/".join(_OUR_NAMES.get(part, re.escape(part)) for part in parts)


def _find(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
  """Returns the value of the first pattern, a regular expression or last part, that a name matches."""
  for pattern, value in patterns.items():
    if matches([pattern], module) or re.fullmatch(f"(.*/)?{pattern}", module):
      return value
  return default


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelAdapter(Adapter):
  """An adapter that changes the kernels of `targets`; see `matches`."""

  targets: Targets = ("query", "value")

  def adapt(self, module: nn.Module) -> nn.Module:
    """Returns a network with changed kernels; see `Adapter.adapt`.

    Raises:
      ValueError: the network stores its kernels in another way than as matrices.
    """
    config: Any = getattr(module, "config", None)
    if getattr(config, "nd_kernels", False) or getattr(config, "param_scan_axis", 1) == 0:
      raise ValueError(
        f"adapters.{type(self).__name__} needs kernels that are matrices, stacked along axis 1 if layers are "
        "scanned: use T5X's plain T5 (network.T5Config), and param_scan_axis = 1"
      )
    return super().adapt(module)

  def check_names(self, params: Flat) -> None:
    """Raises ValueError if a target, or a pattern of the settings, matches no kernel of `params`."""
    modules = [name.rpartition("/")[0] for name, x in params.items() if is_kernel(name, x)]
    given = [self.targets] if isinstance(self.targets, str) else [[each] for each in self.targets]
    found = {repr(target): [matches(target, module) for module in modules] for target in given}
    found |= {repr(p): [_find({p: True}, m, False) for m in modules] for p in self._patterns()}
    for target, are_matched in found.items():
      if not any(are_matched):
        known = ", ".join(sorted({module.rpartition("/")[2] for module in modules}))
        raise ValueError(
          f"adapters.{type(self).__name__} has {target}, which matches no projection of this network. A list "
          f"has last parts of names ({known}); a string is a regular expression of whole names, such as "
          f"{modules[0]}, or 'all-linear'"
        )
    super().check_names(params)

  def _patterns(self) -> Sequence[str]:
    """Returns further patterns, each of which must match a projection."""
    return ()

  def _targeted(self, params: Flat) -> Iterator[tuple[str, Any]]:
    """Yields the name of each targeted projection, and its kernel."""
    for name, kernel in params.items():
      module = name.rpartition("/")[0]
      if is_kernel(name, kernel) and matches(self.targets, module):
        yield module, kernel

  def added_axes(self, params: Flat, axes: Mapping[str, tuple[str | None, ...]]) -> Flat:
    """Returns the logical axes of the added parameters: those of the kernel's dimensions that they have."""
    added = super().added_axes(params, axes)
    for module, _ in self._targeted(params):
      dims = self._dimensions(module, *axes[f"{module}/kernel"])
      added |= {f"{module}/{end}": of_end for end, of_end in dims.items()}
    return added

  def _dimensions(self, module: str, inputs: Any, *others: Any, rank: Any = None) -> dict[str, Any]:
    """Returns the dimensions of a projection's added parameters: their sizes or their logical axes.

    Args:
      module: the projection.
      inputs: the first dimension of its kernel.
      *others: the others: (outputs,), or (layers, outputs) if layers are scanned.
      rank: the dimension between LoRA's matrices.
    """
    raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRA(KernelAdapter):
  """Adds the product of two small matrices to kernels (Hu et al. 2021, arXiv:2106.09685).

  A projection x·W becomes x·W + s·x·A·B, where A is [I, rank], uniform in ±1/sqrt(I) at first, and B is
  [rank, O], zero at first, as in PEFT.

  Attributes:
    targets: the projections; see `matches`.
    rank: the rank of A·B.
    alpha: s is alpha / rank; None for 2·rank.
    rslora: whether s is alpha / sqrt(rank) (Kalajdzievski 2023, arXiv:2312.03732).
    dora: whether the norms of the columns of W + s·A·B are parameters too (Liu et al. 2024, arXiv:2402.09353).
    dropout: the share of the inputs that A does not see in training.
    rank_pattern: other ranks of some projections, by last parts of names or regular expressions.
    alpha_pattern: other alphas in the same way.
  """

  rank: Positive = 16
  alpha: PositiveNumber | None = None
  rslora: bool = False
  dora: bool = False
  dropout: Rate = 0.0
  rank_pattern: Mapping[str, int] = dataclasses.field(default_factory=dict)
  alpha_pattern: Mapping[str, float] = dataclasses.field(default_factory=dict)

  suffixes: ClassVar = ("lora_a", "lora_b", "dora_magnitude")

  def rank_of(self, module: str) -> int:
    """Returns the rank of a projection."""
    return int(_find(self.rank_pattern, module, self.rank))

  def factor_of(self, module: str) -> float:
    """Returns s of a projection."""
    default = 2 * self.rank if self.alpha is None else self.alpha
    rank, alpha = self.rank_of(module), float(_find(self.alpha_pattern, module, default))
    return alpha / math.sqrt(rank) if self.rslora else alpha / rank

  def _dimensions(self, module: str, inputs: Any, *others: Any, rank: Any = None) -> dict[str, Any]:
    *layers, outputs = others
    dims = {"lora_a": (inputs, *layers, rank), "lora_b": (rank, *layers, outputs)}
    return {**dims, "dora_magnitude": (outputs, *layers)} if self.dora else dims

  def _patterns(self) -> Sequence[str]:
    return (*self.rank_pattern, *self.alpha_pattern)

  def added_values(self, params: Flat) -> Flat:
    """Returns the initial A, B and, for DoRA, the norms of the kernels' columns."""
    added: Flat = {}
    for module, kernel in self._targeted(params):
      shapes = self._dimensions(module, *kernel.shape, rank=self.rank_of(module))
      key = jax.random.fold_in(jax.random.PRNGKey(self.seed), zlib.crc32(module.encode()))
      bound = 1.0 / math.sqrt(kernel.shape[0])
      a = jax.random.uniform(key, shapes["lora_a"], jnp.float32, -bound, bound)
      added |= {f"{module}/lora_a": a, f"{module}/lora_b": jnp.zeros(shapes["lora_b"])}
      if self.dora:
        norms = jnp.linalg.norm(kernel.astype(jnp.float32), axis=0).T
        added[f"{module}/dora_magnitude"] = norms * params.get(f"{module}/kernel_scale", 1.0)
    return added

  def adapted_kernel(self, module: str, kernel: Any, added: Mapping[str, Any]) -> AdaptedKernel:
    """Returns the changed kernel of a projection."""
    return AdaptedKernel(kernel, **added, factor=self.factor_of(module), dropout=self.dropout)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IA3(KernelAdapter):
  """Scales keys, values and the hidden layer by trained vectors, one at first (arXiv:2205.05638).

  The outputs that are scaled include the bias.

  Attributes:
    targets: the projections; see `matches`.
    input_targets: those of them whose inputs are scaled; the outputs of the others are.
  """

  targets: Targets = ("key", "value", "wo")
  input_targets: Targets = ("wo",)

  suffixes: ClassVar = ("ia3_scaling",)

  def scales_inputs(self, module: str) -> bool:
    """Returns whether the inputs of a projection are scaled, instead of its outputs."""
    return matches(self.input_targets, module)

  def _dimensions(self, module: str, inputs: Any, *others: Any, rank: Any = None) -> dict[str, Any]:
    *layers, outputs = others
    scaled = inputs if self.scales_inputs(module) else outputs
    return {"ia3_scaling": (scaled, *layers)}

  def added_values(self, params: Flat) -> Flat:
    """Returns vectors of ones."""
    shapes = {module: self._dimensions(module, *x.shape) for module, x in self._targeted(params)}
    return {f"{module}/ia3_scaling": jnp.ones(of["ia3_scaling"]) for module, of in shapes.items()}

  def adapted_kernel(self, module: str, kernel: Any, added: Mapping[str, Any]) -> AdaptedKernel:
    """Returns the changed kernel of a projection."""
    side = "input_scale" if self.scales_inputs(module) else "output_scale"
    vectors = {side if end == "ia3_scaling" else end: x for end, x in added.items()}
    return AdaptedKernel(kernel, **vectors)
