"""The interfaces of models and of their decode functions."""

from __future__ import annotations

import abc
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array, Float

from rosetta_t5.argument_types import near_hint
from rosetta_t5.models.batch_metrics import Metrics
from rosetta_t5.networks.expert_settings import has_experts
from rosetta_t5.networks.other_networks import setting_of
from rosetta_t5.training import losses

PyTree = Any
Shapes = Mapping[str, tuple[int, ...]]
Batch = Mapping[str, jax.Array]


class LazySeqioClass:
  """A class attribute whose value is a SeqIO class, which is imported on first access.

  SeqIO imports TensorFlow, which a model needs only when it is used with a dataset.
  """

  def __init__(self, name: str):
    self._name = name

  def __get__(self, instance: Any, owner: type) -> Any:
    # Gin reads all attributes of a class that a file names, without using them.
    if instance is None and "seqio" not in sys.modules:
      return self
    import seqio

    return getattr(seqio, self._name)


class BaseModel(abc.ABC):
  """The interface that training, evaluation, inference and planning use (T5X: BaseModel).

  To bring your own model, subclass this class (or `BaseTransformerModel`, `EncoderDecoderModel` or
  `DecoderOnlyModel`) and implement the abstract methods. Everything else has a default that also
  holds for a subclass whose `__init__` does not call this one.

  Attributes:
    FEATURE_CONVERTER_CLS: the SeqIO feature converter that makes this model's batches.
    module: the linen module that the model wraps, or None.
    loss_chunk_length: the number of target positions whose logits are computed at a time; None for all of them.
    adapter: the `Adapter` that trains few parameters; None if all are trained.
  """

  FEATURE_CONVERTER_CLS: Any = None
  module: Any = None
  loss_chunk_length: int | None = None
  adapter: Any = None

  # T5X's name: subclasses written for T5X set it.
  _loss_normalizing_factor: float | losses.SpecialLossNormalizingFactor | None = None

  def __init__(self, optimizer_def: Any):
    self.optimizer_def = optimizer_def

  @property
  def network_config(self) -> Any:
    """The config of the model's linen module, such as a `T5Config`; None if the module has none."""
    return getattr(self.module, "config", None)

  @property
  def pad_id(self) -> int:
    """The token that is padding, by the network's config; 0 if it does not say."""
    token = setting_of(self.network_config, "pad_id")
    return token if isinstance(token, int) else 0  # T5X's tests pass mocks of networks

  @property
  def has_experts(self) -> bool:
    """Whether layers of the network have experts."""
    return has_experts(self.network_config)

  @property
  def loss_normalizing_factor(self) -> float | losses.SpecialLossNormalizingFactor | None:
    """The number that the loss is divided by, or how it is computed; None if the loss is a sum."""
    return self._loss_normalizing_factor

  @abc.abstractmethod
  def loss_fn(
    self, params: PyTree, batch: Batch, dropout_rng: jax.Array | None
  ) -> tuple[Float[Array, ""], Metrics]:
    """Returns the loss and the metrics of a batch; `dropout_rng = None` disables dropout."""

  def eval_fn(
    self, params: PyTree, batch: Batch, flax_mutables: PyTree | None = None
  ) -> tuple[Float[Array, ""], Metrics]:
    """Returns the loss and the metrics of a batch, without dropout; ignores mutable collections."""
    return self.loss_fn(params, batch, dropout_rng=None)

  def predict_batch(
    self, params: PyTree, batch: Batch, rng: jax.Array | None = None
  ) -> jax.Array | PyTree:
    """Returns the predictions for a batch."""
    return self.predict_batch_with_aux(params, batch, rng=rng)[0]

  @abc.abstractmethod
  def predict_batch_with_aux(
    self, params: PyTree, batch: Batch, rng: jax.Array | None = None
  ) -> tuple[PyTree, Mapping[str, jax.Array]]:
    """Returns the predictions for a batch and auxiliary arrays, such as scores."""

  @abc.abstractmethod
  def score_batch(
    self, params: PyTree, batch: Batch, return_intermediates: bool = False
  ) -> jax.Array | tuple[jax.Array, Mapping[str, Any]]:
    """Returns the log likelihood of each example's targets, [B]."""

  @abc.abstractmethod
  def get_initial_variables(
    self, rng: jax.Array, input_shapes: Shapes, input_types: Mapping[str, Any] | None = None
  ) -> Mapping[str, PyTree]:
    """Returns the initial variables by collection, for inputs of these shapes."""


def has_argument(function: Callable[..., Any], argument: str) -> bool:
  """Returns whether a function has a parameter of this name."""
  return argument in inspect.signature(function).parameters


def accepts(function: Callable[..., Any], argument: str) -> bool:
  """Returns whether a function can be called with the keyword `argument`."""
  parameters = inspect.signature(function).parameters
  return argument in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def call_decode_fn(
  decode_fn: Callable[..., tuple[jax.Array, jax.Array]],
  decoder_params: Mapping[str, Any] | None,
  rng: jax.Array | None,
  optional: Mapping[str, Any],
  **arguments: Any,
) -> tuple[jax.Array, jax.Array]:
  """Calls a model's decode function with the arguments that it accepts.

  Args:
    decode_fn: the decode function.
    decoder_params: the caller's arguments, which override the model's.
    rng: the caller's random key, for `decode_rng`, if the function uses randomness.
    optional: T5X's arguments that the function may lack if they have no effect.
    **arguments: the arguments that every decode function has.

  Raises:
    ValueError: there are two random keys, or the function lacks an argument that it needs.
  """
  params = dict(decoder_params or {})
  if rng is not None:
    if params.get("decode_rng") is not None:
      raise ValueError(
        f"Got RNG both from the `rng` argument ({rng}) and `decoder_params['decode_rng']` "
        f"({params['decode_rng']}). Please specify one or the other."
      )
    if accepts(decode_fn, "decode_rng"):
      params["decode_rng"] = rng
  for name, value in optional.items():
    if accepts(decode_fn, name):
      params.setdefault(name, value)
    elif name == "initial_index" or value:
      raise ValueError(
        f"the decode function {getattr(decode_fn, '__name__', decode_fn)} needs an argument {name} for "
        "this model (docs/decoding.md explains when)"
      )
  _check_names(decode_fn, params)
  return decode_fn(**{**arguments, **params})


def set_decode_fn(model: Any, decode_fn: Callable[..., Any], **options: Any) -> None:
  """Makes a model decode with a function and values of its arguments, such as repetition_penalty=1.2.

  Raises:
    ValueError: the function does not accept one of them.
  """
  _check_names(decode_fn, options)
  model._decode_fn = functools.partial(decode_fn, **options)


def _check_names(decode_fn: Callable[..., Any], params: Mapping[str, Any]) -> None:
  """Raises ValueError for a decoder parameter that the function does not accept."""
  for name in params:
    if not accepts(decode_fn, name):
      known = list(inspect.signature(decode_fn).parameters)
      raise ValueError(
        f"decoder_params has {name!r}, which the decode function does not accept"
        f"{near_hint(name, known)}: it accepts {', '.join(known)}"
      )


def get_input_vocabulary(model: Any) -> Any:
  """Returns the vocabulary of the model's inputs."""
  return model.input_vocabulary


def get_output_vocabulary(model: Any) -> Any:
  """Returns the vocabulary of the model's targets."""
  return model.output_vocabulary
