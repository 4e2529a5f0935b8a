"""The interface of models: loss, predictions, scores and initial variables."""

from __future__ import annotations

import abc
import sys
from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import Array, Float

from rosetta_t5.models.batch_metrics import Metrics
from rosetta_t5.networks.expert_settings import has_experts
from rosetta_t5.training import losses

PyTree = Any
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
  """

  FEATURE_CONVERTER_CLS: Any = None
  module: Any = None

  # T5X's names: subclasses written for T5X set these two.
  _loss_normalizing_factor: float | losses.SpecialLossNormalizingFactor | None = None
  _loss_chunk_length: int | None = None

  def __init__(self, optimizer_def: Any):
    self.optimizer_def = optimizer_def

  @property
  def network_config(self) -> Any:
    """The config of the model's linen module, such as a `T5Config`; None if the module has none."""
    return getattr(self.module, "config", None)

  @property
  def has_experts(self) -> bool:
    """Whether layers of the network have experts."""
    return has_experts(self.network_config)

  @property
  def loss_normalizing_factor(self) -> float | losses.SpecialLossNormalizingFactor | None:
    """The number that the loss is divided by, or how it is computed; None if the loss is a sum."""
    return self._loss_normalizing_factor

  @property
  def loss_chunk_length(self) -> int | None:
    """The number of target positions whose logits are computed at a time; None for all of them."""
    return self._loss_chunk_length

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
    self,
    rng: jax.Array,
    input_shapes: Mapping[str, tuple[int, ...]],
    input_types: Mapping[str, Any] | None = None,
  ) -> Mapping[str, PyTree]:
    """Returns the initial variables by collection, for inputs of these shapes."""
