"""What adapters have in common: which parameters they train, what they add to a network, and their optimizer."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import FrozenDict, freeze, unfreeze
from flax.linen import partitioning
from flax.traverse_util import flatten_dict, unflatten_dict

from rosetta_t5.argument_types import NonNegative, Positive, check_one_of, one_of
from rosetta_t5.networks.layers.adapted_kernels import AdaptedKernel
from rosetta_t5.networks.layers.prompt import from_sample_of_embeddings
from rosetta_t5.training.optimizers import optimizer_def
from rosetta_t5.training.optimizers.optimizer_def import Optimizer, OptimizerDef, OptimizerState
from rosetta_t5.user_errors import OWN_PACKAGES

PyTree = Any
Flat = dict[str, Any]  # parameters by name, such as encoder/layers_0/attention/query/kernel

_SCALE = "kernel_scale"
_FROZEN_DTYPES = ("bfloat16", "int8")
FrozenDType = Annotated[str, one_of(_FROZEN_DTYPES)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
  """A method that trains a small part of a network's parameters, which may be added to it.

  Bind it to a model: `models.EncoderDecoderModel.adapter = @adapters.LoRA()`. All other parameters are
  frozen: they have no gradients and no optimizer state, and if the run began with a checkpoint, its own
  checkpoints leave them out.

  Attributes:
    frozen_dtype: the dtype in which frozen parameters are kept: 'bfloat16' halves their memory, and 'int8'
      halves that of kernels again, with one scale for each column; None for float32.
    seed: the seed of the added parameters' random values.
  """

  frozen_dtype: FrozenDType | None = None
  seed: NonNegative = 0

  # The ends of the names of added parameters, and regular expressions of the others that are trained.
  suffixes: ClassVar[tuple[str, ...]] = ()
  patterns: ClassVar[tuple[str, ...]] = ()

  def __post_init__(self) -> None:
    if self.frozen_dtype is not None:
      check_one_of(f"{type(self).__name__}.frozen_dtype", self.frozen_dtype, _FROZEN_DTYPES)

  def settings(self) -> dict[str, Any]:
    """Returns the method and its settings as values of JSON; see `from_settings`."""
    return {"method": type(self).__name__, **dataclasses.asdict(self)}

  def is_trained(self, name: str) -> bool:
    """Returns whether the parameter with this name is trained."""
    return self.adds(name) or any(re.fullmatch(pattern, name) for pattern in self.patterns)

  def adds(self, name: str) -> bool:
    """Returns whether the parameter with this name is one that the adapter adds to the network."""
    return name.rpartition("/")[2] in self.suffixes

  def adapt(self, module: nn.Module) -> nn.Module:
    """Returns a network that is initialized with the added parameters, and computes with them.

    It has the class's methods and fields. The kernels of a user's own network are replaced by changed
    ones; this project's layers multiply by what was added (see `AdaptedKernel`).
    """
    adapter, network = self, type(module)
    is_own = network.__module__.startswith(OWN_PACKAGES)

    class Adapted(network):  # type: ignore[misc, valid-type]
      def init(self, *args: Any, **options: Any) -> Any:
        is_part = options.get("method") is not None  # such as the encoder alone
        return adapter.with_added(super().init(*args, **options), is_part)

      def apply(self, variables: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        params = adapter.attached(variables["params"], as_arrays=not is_own)
        return super().apply({**variables, "params": params}, *args, **options)

    Adapted.__name__, Adapted.__qualname__ = network.__name__, network.__qualname__
    Adapted.__module__ = network.__module__
    settings = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init}
    return Adapted(**{name: x for name, x in settings.items() if name not in ("parent", "name")})

  def with_added(self, variables: Mapping[str, Any], is_part: bool = False) -> Mapping[str, Any]:
    """Returns the variables of `module.init` with the added parameters and their logical axes.

    Args:
      variables: the variables.
      is_part: whether they are those of a part of the network, which may have nothing to train.

    Raises:
      ValueError: the network has no parameter that this adapter trains or changes.
    """
    params, axes = flat(variables["params"]), flat(variables["params_axes"])
    params |= self.added_values(params)
    if not is_part:
      self.check_names(params)
    params = self.as_frozen(params)
    known = {name.removesuffix("_axes"): tuple(x.names or ()) for name, x in axes.items()}
    for name, dims in self.added_axes(params, known).items():
      axes[f"{name}_axes"] = partitioning.AxisMetadata(tuple(dims))
    changed = {**variables, "params": unflatten_dict(params, sep="/")}
    changed["params_axes"] = unflatten_dict(axes, sep="/")
    return freeze(changed) if isinstance(variables, FrozenDict) else changed

  def check_names(self, params: Flat) -> None:
    """Raises ValueError if none of `params` is trained."""
    if not any(map(self.is_trained, params)):
      kinds = sorted({re.sub(r"\d+", "N", name) for name in params})
      raise ValueError(
        f"adapters.{type(self).__name__} trains no parameter of this network: none matches "
        f"{' or '.join(self.patterns or self.suffixes)}. The network has {', '.join(kinds)}"
      )

  def as_frozen(self, params: Flat) -> Flat:
    """Returns parameters by name, the frozen ones in `frozen_dtype`."""
    if self.frozen_dtype is None:
      return params
    frozen = {}
    for name, value in params.items():
      if self.is_trained(name) or not jnp.issubdtype(value.dtype, jnp.floating):
        frozen[name] = value
      elif self.frozen_dtype == "int8" and is_kernel(name, value):
        frozen[name], frozen[f"{name}_scale"] = quantized(value)
      else:
        frozen[name] = value.astype(jnp.bfloat16)
    return frozen

  def added_axes(self, params: Flat, axes: Mapping[str, tuple[str | None, ...]]) -> Flat:
    """Returns the logical axes of the parameters that were added, by name.

    Args:
      params: the parameters with the added ones.
      axes: the logical axes of the others.
    """
    kernels = (name.removesuffix("_scale") for name in params if name.endswith(f"/{_SCALE}"))
    return {f"{name}_scale": axes[name][:0:-1] for name in kernels}

  def added_values(self, params: Flat) -> Flat:
    """Returns the initial values of the parameters that are added to `params`, by name."""
    return {}

  def attached(self, params: PyTree, as_arrays: bool = False) -> PyTree:
    """Returns the parameters of the network without those that were added, whose kernels are changed.

    Args:
      params: the parameters with the added ones.
      as_arrays: whether the changed kernels are computed; otherwise each is an `AdaptedKernel`.
    """
    remaining = flat(params)
    for name in [name for name in remaining if name.endswith("/kernel")]:
      module = name.rpartition("/")[0]
      if added := self.pop_added(remaining, module):
        kernel = self.adapted_kernel(module, remaining[name], added)
        remaining[name] = kernel.merged() if as_arrays else kernel
        bias = remaining.get(f"{module}/bias")
        if bias is not None and kernel.output_scale is not None:  # Biases are outputs too.
          remaining[f"{module}/bias"] = bias * kernel.output_scale
    return unflatten_dict(remaining, sep="/")

  def pop_added(self, params: Flat, module: str) -> Flat:
    """Removes what was added to a projection from `params`; returns it by the ends of the names."""
    ends = [end for end in (_SCALE, *self.suffixes) if f"{module}/{end}" in params]
    return {end: params.pop(f"{module}/{end}") for end in ends}

  def adapted_kernel(self, module: str, kernel: Any, added: Mapping[str, Any]) -> AdaptedKernel:
    """Returns the changed kernel of a projection from its added parameters, by the ends of their names."""
    return AdaptedKernel(kernel, **added)

  def merged(self, params: PyTree) -> PyTree:
    """Returns the network's own parameters, with what was added merged into the kernels."""
    return self.attached(params, as_arrays=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BitFit(Adapter):
  """Trains the biases (Ben Zaken et al. 2021, arXiv:2106.10199). T5 has none."""

  patterns: ClassVar = (r"(.*/)?bias",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norms(Adapter):
  """Trains the scales and biases of the layer norms."""

  patterns: ClassVar = (r".*norm[^/]*/(scale|bias)",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptTuning(Adapter):
  """Trains vectors that precede the embedded inputs (Lester et al. 2021, arXiv:2104.08691).

  At first they are rows of the embedding table, drawn from its first 5000 as in the paper.

  Attributes:
    length: the number of vectors.
  """

  length: Positive = 100

  suffixes: ClassVar = ("prompt",)

  def adapt(self, module: nn.Module) -> nn.Module:
    """Returns a network whose encoder, or else decoder, has a prompt."""
    config = dataclasses.replace(module.config, prompt_length=self.length)
    return super().adapt(module.clone(config=config))

  def added_values(self, params: Flat) -> Flat:
    """Returns the initial vectors."""
    side = "encoder" if any(name.startswith("encoder/") for name in params) else "decoder"
    own = params.get(f"{side}/token_embedder/embedding")
    table = params["token_embedder/embedding"] if own is None else own
    init, shape = from_sample_of_embeddings(table, 5000), (self.length, table.shape[1])
    return {f"{side}/prompt/prompt/prompt": init(jax.random.PRNGKey(self.seed), shape)}


def flat(tree: PyTree) -> Flat:
  """Returns a nested dict as a flat one, by names such as encoder/layers_0/mlp/wi/kernel."""
  return flatten_dict(unfreeze(tree), sep="/")


def is_kernel(name: str, value: Any) -> bool:
  """Returns whether a parameter is the matrix of a projection, or such matrices of scanned layers."""
  return name.endswith("/kernel") and "/expert/" not in name and value.ndim in (2, 3)


def quantized(kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns a kernel in int8, and the scale of each column: its largest absolute value / 127."""
  scale = jnp.maximum(jnp.max(jnp.abs(kernel), axis=0), 1e-12).astype(jnp.float32) / 127.0
  return jnp.round(kernel / scale[None]).astype(jnp.int8), scale.T


class AdapterOptimizer(OptimizerDef):
  """An optimizer of the parameters that an adapter trains; its state is that of a smaller network.

  Args:
    optimizer: the optimizer of these parameters.
    adapter: the adapter.
  """

  def __init__(self, optimizer: OptimizerDef, adapter: Adapter):
    self.optimizer, self.adapter = optimizer, adapter
    self.uses_learning_rate, self.uses_loss = optimizer.uses_learning_rate, optimizer.uses_loss
    self.max_skipped_steps = optimizer.max_skipped_steps
    self.max_restorations = optimizer.max_restorations
    super().__init__(optimizer.hyper_params)

  def trained(self, params: PyTree) -> PyTree:
    """Returns the parameters that the adapter trains."""
    paths = flatten_dict(unfreeze(params))
    return unflatten_dict({p: x for p, x in paths.items() if self.adapter.is_trained("/".join(p))})

  def added_values(self, params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the initial values of the parameters that the adapter adds."""
    return self.adapter.added_values(dict(params))

  def init_state(self, params: PyTree) -> OptimizerState:
    """Returns the state of step 0 of the trained parameters."""
    return self.optimizer.init_state(self.trained(params))

  def apply_gradient(
    self, hyper_params: Any, params: PyTree, state: OptimizerState, grads: PyTree
  ) -> tuple[PyTree, OptimizerState]:
    """Returns the parameters, of which the trained ones changed, and the state after one step."""
    part, state = self.optimizer.apply_gradient(hyper_params, self.trained(params), state, grads)
    return optimizer_def.replace_part(params, part), state

  def params_to_evaluate(self, params: PyTree, param_states: PyTree) -> PyTree:
    """Returns the parameters that the optimizer evaluates, and the frozen ones."""
    part = self.optimizer.params_to_evaluate(self.trained(params), param_states)
    return optimizer_def.replace_part(params, part)

  def update_hyper_params(self, **hyper_param_overrides: Any) -> Any:
    """Returns the optimizer's hyperparameters with some replaced."""
    return self.optimizer.update_hyper_params(**hyper_param_overrides)

  def set_param_axes(self, param_logical_axes: PyTree) -> None:
    """Passes the names of the trained parameters' logical axes on."""
    self.optimizer.set_param_axes(self.trained(param_logical_axes))

  def derive_logical_axes(self, optimizer: Optimizer, param_logical_axes: PyTree) -> Optimizer:
    """Returns `optimizer` with axis names, or None, in place of arrays."""
    part = Optimizer(self.optimizer, optimizer.state, self.trained(optimizer.target))
    axes = self.optimizer.derive_logical_axes(part, self.trained(param_logical_axes))
    return optimizer.replace(state=axes.state, target=param_logical_axes)
