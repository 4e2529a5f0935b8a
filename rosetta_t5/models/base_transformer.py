"""The loss, the scores and the decoding that all transformer models share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import freeze, unfreeze
from jaxtyping import Array, Float

from rosetta_t5.adapters import Adapter
from rosetta_t5.adapters.adapter import AdapterOptimizer
from rosetta_t5.kernels.cross_entropy import chunked_cross_entropy
from rosetta_t5.models.base_model import Batch, PyTree, Shapes
from rosetta_t5.models.batch_metrics import Metrics, add_expert_losses, compute_base_metrics
from rosetta_t5.models.decoding_model import DecodingModel
from rosetta_t5.training import losses


class BaseTransformerModel(DecodingModel):
  """The loss, the scores and the decoding that encoder-decoder and decoder-only models share."""

  # The defaults also hold for a subclass whose `__init__` does not call this one.
  _decode_fn: Callable[..., Any] | None = None
  _label_smoothing: float = 0.0
  _z_loss: float = 0.0
  _expert_loss_factors: tuple[float, float] = (0.0, 0.0)

  def __init__(
    self,
    module: nn.Module,
    input_vocabulary: Any,
    output_vocabulary: Any,
    optimizer_def: Any,
    decode_fn: Callable[..., Any] | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    loss_normalizing_factor: losses.LossNormalizingFactor | None = None,
    loss_chunk_length: int | None = None,
    aux_loss_factor: float = 0.0,
    router_z_loss_factor: float = 0.0,
    adapter: Adapter | None = None,
  ):
    """Builds a model around a linen module.

    Args:
      module: the network.
      input_vocabulary: the SeqIO vocabulary of the inputs.
      output_vocabulary: the SeqIO vocabulary of the targets.
      optimizer_def: the optimizer, which the trainer reads from the model as in T5X.
      decode_fn: beam search, sampling, or a function with the same signature.
      label_smoothing: the share of the target's probability that is spread over the other tokens.
      z_loss: the weight of the squared log of the softmax normalizer.
      loss_normalizing_factor: the divisor of the loss: a number, a `SpecialLossNormalizingFactor` or
        its name, or None for a plain sum.
      loss_chunk_length: the number of target positions whose logits are computed at a time for loss
        and scores; None for all at once, which is faster if memory allows it.
      aux_loss_factor: the weight of the mean load balancing loss of layers with experts. It is added
        to the normalized loss of the tokens, as in T5X once per microbatch; see `share_of_batch`.
      router_z_loss_factor: the weight of the mean z-loss of their routers, added in the same way.
      adapter: trains few parameters, which it may add to `module`; None trains all.

    Raises:
      ValueError: `loss_normalizing_factor` is an unknown name; `loss_chunk_length` is set, but the model
        overrides `_compute_metrics`; or a factor is set, but no layer has experts.
    """
    if adapter is not None:
      module = adapter.adapt(module)
      optimizer_def = optimizer_def and AdapterOptimizer(optimizer_def, adapter)
    super().__init__(optimizer_def)
    self.module = module
    self.adapter = adapter
    self._input_vocabulary = input_vocabulary
    self._output_vocabulary = output_vocabulary
    self._decode_fn = decode_fn
    self._label_smoothing = label_smoothing
    self._z_loss = z_loss
    self.loss_chunk_length = loss_chunk_length
    self._expert_loss_factors = (aux_loss_factor, router_z_loss_factor)
    if (aux_loss_factor or router_z_loss_factor) and not self.has_experts:
      raise ValueError(
        f"{type(self).__name__} has aux_loss_factor = {aux_loss_factor} and router_z_loss_factor = "
        f"{router_z_loss_factor}, but no layer of the network has experts: set both to 0.0, or num_experts "
        "of the network's config"
      )
    overrides_metrics = type(self)._compute_metrics is not BaseTransformerModel._compute_metrics
    if loss_chunk_length and overrides_metrics:
      raise ValueError(
        f"{type(self).__name__}._compute_metrics needs all logits, which do not exist with "
        f"loss_chunk_length = {loss_chunk_length}: set it to None"
      )
    convert = losses.convert_special_loss_normalizing_factor_to_enum
    self._loss_normalizing_factor = convert(loss_normalizing_factor)

  @property
  def input_vocabulary(self) -> Any:
    """The SeqIO vocabulary of the inputs."""
    return self._input_vocabulary

  @property
  def output_vocabulary(self) -> Any:
    """The SeqIO vocabulary of the targets."""
    return self._output_vocabulary

  @property
  def decode_fn(self) -> Any:
    """The decode function: beam search, sampling, or one of the user's."""
    return self._decode_fn

  def _module_arguments(self, batch: Batch) -> tuple[list[jax.Array], dict[str, Any]]:
    """Returns the arguments of the module that contain the features of a batch."""
    raise NotImplementedError

  def get_initial_variables(
    self, rng: jax.Array, input_shapes: Shapes, input_types: Mapping[str, Any] | None = None
  ) -> Mapping[str, PyTree]:
    """Returns the initial variables; the same key gives T5X's parameters."""
    types = input_types or {}
    batch = {n: jnp.ones(shape, types.get(n, jnp.int32)) for n, shape in input_shapes.items()}
    # The shapes may be those of the inputs only.
    batch["decoder_target_tokens"] = jnp.ones_like(batch["decoder_input_tokens"])
    tokens, features = self._module_arguments(batch)
    flags = {"decode": False, "enable_dropout": False}
    return freeze(self.module.init(rng, *tokens, **flags, **features))

  def _compute_logits(
    self,
    params: PyTree,
    batch: Batch,
    dropout_rng: jax.Array | None = None,
    mutable: Any = False,
    other_variables: PyTree | None = None,
    **module_options: Any,
  ) -> Any:
    """Returns the logits, [B, T, V], and if `mutable` is set also the collections that it names."""
    tokens, features = self._module_arguments(batch)
    return self.module.apply(
      {"params": params, **(other_variables or {})},
      *tokens,
      **features,
      decode=False,
      enable_dropout=dropout_rng is not None,
      rngs=None if dropout_rng is None else {"dropout": dropout_rng},
      mutable=mutable,
      **module_options,
    )

  def loss_fn(
    self, params: PyTree, batch: Batch, dropout_rng: Array | None, flax_mutables: PyTree = None
  ) -> tuple[Float[Array, ""], Any]:
    """Returns the loss and the metrics of the batch.

    Args:
      params: the parameters.
      batch: the features that the feature converter makes. `decoder_loss_weights` are the weights of
        the targets. Without them each target, including padding, has weight 1, unless
        `loss_normalizing_factor` is a special one.
      dropout_rng: the random key for dropout; None disables dropout.
      flax_mutables: other variable collections. If given, the result is
        (loss, (metrics, new flax_mutables)).
    """
    options: dict[str, Any] = {}
    collections = [*(flax_mutables or {}), *(["intermediates"] if self.has_experts else [])]
    if collections:
      options = {"mutable": collections, "other_variables": flax_mutables}
    outputs = self._logits_or_factors(params, batch, dropout_rng, **options)
    logits, mutables = outputs if collections else (outputs, {})
    targets = _targets(batch)
    divide_by = self._loss_normalizing_factor
    factor, weights = losses.get_loss_normalizing_factor_and_weights(divide_by, batch, self.pad_id)
    correct = None
    if self.loss_chunk_length:
      token_loss, token_z, correct = chunked_cross_entropy(
        logits, targets, self._z_loss, self._label_smoothing, self.loss_chunk_length
      )
      loss, z_loss, _ = losses.weighted_sums(token_loss, token_z, weights, factor)
    else:
      loss, z_loss, _ = losses.compute_weighted_cross_entropy(
        logits, targets, weights, self._label_smoothing, self._z_loss, factor
      )
    expert_metrics: Metrics = {}
    if self.has_experts:
      mutables = dict(mutables)
      share = losses.share_of_batch(divide_by, factor, weights)
      aux_loss_factor, router_z_loss_factor = self._expert_loss_factors
      factors = (aux_loss_factor * share, router_z_loss_factor * share)
      sown = mutables.pop("intermediates", {})
      loss, expert_metrics = add_expert_losses(
        loss, z_loss, sown, factors, self.network_config, targets.size
      )
    # By name, because methods that were written for T5X may accept them in another order.
    known: dict[str, Any] = {"targets": targets, "mask": weights, "loss": loss, "z_loss": z_loss}
    known["segment_ids"] = self._segment_ids(batch)
    if correct is None:
      metrics = self._compute_metrics(logits=logits, **known)
    else:
      metrics = compute_base_metrics(None, correct=correct, **known)
    metrics |= expert_metrics
    return (loss, (metrics, mutables)) if flax_mutables else (loss, metrics)

  def _logits_or_factors(self, *args: Any, **options: Any) -> Any:
    """Returns the logits, or their two factors if the loss is computed in chunks."""
    if self.loss_chunk_length:
      options["return_logits"] = False
    return self._compute_logits(*args, **options)

  def _compute_metrics(
    self,
    logits: jax.Array,
    targets: jax.Array,
    mask: jax.Array | None,
    loss: jax.Array,
    z_loss: jax.Array | None = None,
    segment_ids: Mapping[str, jax.Array] | None = None,
  ) -> Metrics:
    """Returns the metrics of a batch; override to add your own."""
    return compute_base_metrics(logits, targets, mask, loss, z_loss, segment_ids)

  def _segment_ids(self, batch: Batch) -> dict[str, jax.Array]:
    """Returns the example that each position of each feature belongs to, under T5X's names."""
    suffix = "_segment_ids"
    packed = {n.removesuffix(suffix): ids for n, ids in batch.items() if n.endswith(suffix)}
    if packed:
      return packed
    tokens = ("encoder_input_tokens", "decoder_target_tokens")
    return {
      name: _is_real(batch[name], self.pad_id).astype("int32") for name in tokens if name in batch
    }

  def score_batch(
    self, params: PyTree, batch: Batch, return_intermediates: bool = False
  ) -> jax.Array | tuple[jax.Array, Mapping[str, Any]]:
    """Returns the log likelihood of each example's targets, [B], weighted by the loss weights.

    Without `decoder_loss_weights`, everything but padding has weight 1. With `return_intermediates`,
    also returns the intermediates that the module sowed and, under `decoder`, T5X's `target_tokens`,
    `loss_weights` and `token_scores`, each in a tuple of one.
    """
    options = {"mutable": ["intermediates"]} if return_intermediates else {}
    outputs = self._logits_or_factors(params, batch, **options)
    logits_BTV, collections = outputs if return_intermediates else (outputs, {})
    targets_BT = _targets(batch)
    weights_BT = batch.get("decoder_loss_weights", targets_BT != self.pad_id)
    if chunk := self.loss_chunk_length:
      log_probs_BT = -chunked_cross_entropy(logits_BTV, targets_BT, 0.0, 0.0, chunk).loss_BT
    else:
      log_probs_BTV = jax.nn.log_softmax(logits_BTV)
      log_probs_BT = jnp.take_along_axis(log_probs_BTV, targets_BT[..., None], axis=-1)[..., 0]
    scores_BT = log_probs_BT * weights_BT
    scores_B = jnp.sum(scores_BT, axis=-1)
    if not return_intermediates:
      return scores_B
    intermediates = dict(unfreeze(collections.get("intermediates", {})))
    intermediates["decoder"] = {
      **intermediates.get("decoder", {}),
      "target_tokens": (targets_BT,),
      "loss_weights": (weights_BT,),
      "token_scores": (scores_BT,),
    }
    return scores_B, intermediates


def _is_real(tokens: jax.Array, pad_id: int) -> jax.Array:
  """Returns whether each position, [B, L], is not padding, which is `pad_id` in all its numbers."""
  is_real = tokens != pad_id
  # Continuous inputs, such as the frames of a spectrogram, are [B, L, ...].
  return is_real if is_real.ndim == 2 else jnp.any(is_real, axis=tuple(range(2, is_real.ndim)))


def _targets(batch: Batch) -> jax.Array:
  """Returns the target ids as integers; pipelines written for T5X may pass them as floats."""
  return batch["decoder_target_tokens"].astype(jnp.int32)
