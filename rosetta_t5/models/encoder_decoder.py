"""The encoder-decoder model: T5's loss, scores and predictions around a linen module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp

from rosetta_t5 import decoding
from rosetta_t5.models.base import BaseTransformerModel, Batch, PyTree
from rosetta_t5.training import losses


class _LazySeqioClass:
  """A class attribute whose value is a class of SeqIO, imported when a model asks for it.

  SeqIO brings TensorFlow, which a model needs only where it meets a dataset. Read from the model's
  class, as inspection does, it is this object, which does what the class would when it is used.
  """

  def __init__(self, name: str):
    self._name = name

  def _load(self) -> Any:
    import seqio

    return getattr(seqio, self._name)

  def __get__(self, instance: Any, owner: type) -> Any:
    return self if instance is None else self._load()

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return self._load()(*args, **kwargs)

  def __getattr__(self, name: str) -> Any:
    if name.startswith("_"):
      raise AttributeError(name)
    return getattr(self._load(), name)


@flax.struct.dataclass
class DecoderParams:
  """How a model decodes unless the caller says otherwise.

  Attributes:
    return_all_decodes: whether all decodes are returned, or the best.
    num_decodes: how many are made: the number of beams, or of samples.
  """

  return_all_decodes: bool = False
  num_decodes: int = 1


class EncoderDecoderModel(BaseTransformerModel):
  """T5 (T5X: EncoderDecoderModel)."""

  FEATURE_CONVERTER_CLS = _LazySeqioClass("EncDecFeatureConverter")

  def __init__(
    self,
    module: nn.Module,
    input_vocabulary: Any,
    output_vocabulary: Any,
    optimizer_def: Any,
    decode_fn: Callable[..., Any] = decoding.beam_search,
    feature_converter_cls: Any = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    loss_normalizing_factor: float | int | str | losses.SpecialLossNormalizingFactor | None = None,
    default_decoder_params: DecoderParams | None = None,
  ):
    """Builds the model; see `BaseTransformerModel` for the arguments not named here.

    Args:
      module: the network, with methods `encode` and `decode` as `networks.t5.Transformer`.
      input_vocabulary: the SeqIO vocabulary of the inputs.
      output_vocabulary: the SeqIO vocabulary of the targets.
      optimizer_def: the optimizer.
      decode_fn: how `predict_batch` decodes.
      feature_converter_cls: another feature converter than SeqIO's EncDecFeatureConverter.
      label_smoothing: see `BaseTransformerModel`.
      z_loss: see `BaseTransformerModel`.
      loss_normalizing_factor: see `BaseTransformerModel`.
      default_decoder_params: how many decodes `predict_batch` makes and returns.
    """
    if feature_converter_cls is not None:
      self.FEATURE_CONVERTER_CLS = feature_converter_cls
    self._default_decoder_params = default_decoder_params or DecoderParams()
    super().__init__(
      module=module,
      input_vocabulary=input_vocabulary,
      output_vocabulary=output_vocabulary,
      optimizer_def=optimizer_def,
      decode_fn=decode_fn,
      label_smoothing=label_smoothing,
      z_loss=z_loss,
      loss_normalizing_factor=loss_normalizing_factor,
    )

  def get_initial_variables(
    self,
    rng: jax.Array,
    input_shapes: Mapping[str, tuple[int, ...]],
    input_types: Mapping[str, Any] | None = None,
  ) -> Mapping[str, PyTree]:
    """Returns the initial variables; the same key gives T5X's parameters."""
    types = input_types or {}
    optional: dict[str, Any] = {
      argument: jnp.ones(input_shapes[name], types.get(name, jnp.int32))
      for argument, name in (
        ("encoder_positions", "encoder_positions"),
        ("decoder_positions", "decoder_positions"),
        ("encoder_segment_ids", "encoder_segment_ids"),
        ("decoder_segment_ids", "decoder_segment_ids"),
      )
      if name in input_shapes
    }
    tokens = [
      jnp.ones(input_shapes[name], types.get(name, jnp.int32))
      for name in ("encoder_input_tokens", "decoder_input_tokens")
    ]
    targets = jnp.ones(input_shapes["decoder_input_tokens"], jnp.int32)
    return self.module.init(rng, *tokens, targets, decode=False, enable_dropout=False, **optional)

  def _compute_logits(
    self,
    params: PyTree,
    batch: Batch,
    dropout_rng: jax.Array | None = None,
    mutable: Any = False,
    other_variables: PyTree | None = None,
  ) -> Any:
    return self.module.apply(
      {"params": params, **(other_variables or {})},
      batch["encoder_input_tokens"],
      batch["decoder_input_tokens"],
      batch["decoder_target_tokens"],
      encoder_segment_ids=batch.get("encoder_segment_ids"),
      decoder_segment_ids=batch.get("decoder_segment_ids"),
      encoder_positions=batch.get("encoder_positions"),
      decoder_positions=batch.get("decoder_positions"),
      decode=False,
      enable_dropout=dropout_rng is not None,
      rngs=None if dropout_rng is None else {"dropout": dropout_rng},
      mutable=mutable,
    )

  def _compute_logits_from_slice(
    self,
    decoding_state: Any,
    params: PyTree,
    encoded_inputs: jax.Array,
    raw_inputs: jax.Array,
    max_decode_length: int,
  ) -> tuple[jax.Array, PyTree]:
    """Returns the logits after one more token of every beam, [B·beams, V], and the new cache."""
    logits, variables = self.module.apply(
      {"params": params, "cache": decoding_state.cache},
      encoded_inputs,
      raw_inputs,
      decoding_state.cur_token,
      decoding_state.cur_token,
      enable_dropout=False,
      decode=True,
      max_decode_length=max_decode_length,
      mutable=["cache"],
      method=self.module.decode,
    )
    return jnp.squeeze(logits, axis=1), variables["cache"]

  def _initial_cache(self, params: PyTree, batch: Batch) -> PyTree:
    """Returns an empty cache as long as the targets."""

    def make_cache() -> PyTree:
      _, variables = self.module.apply(
        {"params": params},
        jnp.ones_like(batch["encoder_input_tokens"]),
        jnp.ones_like(batch["decoder_input_tokens"]),
        jnp.ones_like(batch["decoder_input_tokens"]),
        decode=True,
        enable_dropout=False,
        mutable=["cache"],
      )
      return variables["cache"]

    # Only shapes are wanted: the pass itself is not run.
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(make_cache))

  def predict_batch_with_aux(
    self,
    params: PyTree,
    batch: Batch,
    rng: jax.Array | None = None,
    decoder_params: Mapping[str, Any] | None = None,
    return_all_decodes: bool | None = None,
    num_decodes: int | None = None,
    prompt_with_targets: bool = False,
  ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
    """Returns decodes of the inputs and their scores.

    Args:
      params: the parameters.
      batch: `encoder_input_tokens` [B, S] and `decoder_input_tokens` [B, T]; T limits the decodes.
      rng: the key for sampling.
      decoder_params: further arguments of `decode_fn`.
      return_all_decodes: whether all decodes are returned, [B, N, T], the best last; else the best,
        [B, T].
      num_decodes: N; None for the model's default.
      prompt_with_targets: whether `decoder_input_tokens` begin the decodes.

    Returns:
      (decodes, {"scores": [B, N] or [B]}).
    """
    defaults = self._default_decoder_params
    num_decodes = defaults.num_decodes if num_decodes is None else num_decodes
    if return_all_decodes is None:
      return_all_decodes = defaults.return_all_decodes
    inputs_BS, prompts_BT = batch["encoder_input_tokens"], batch["decoder_input_tokens"]
    encoded_BSD: Any = self.module.apply(
      {"params": params}, inputs_BS, enable_dropout=False, method=self.module.encode
    )
    # Every beam or sample attends to its own copy of the encoded inputs.
    encoded = decoding.flat_batch_beam_expand(encoded_BSD, num_decodes)
    raw_inputs = decoding.flat_batch_beam_expand(inputs_BS, num_decodes)
    options = dict(decoder_params or {})
    if rng is not None:
      options.setdefault("decode_rng", rng)
    if getattr(self.module, "scan_layers", False):
      # Scanned layers stack their caches, so that the batch comes second.
      options.setdefault("cache_offset", 1)

    def tokens_to_logits(state: Any) -> tuple[jax.Array, PyTree]:
      return self._compute_logits_from_slice(
        state, params, encoded, raw_inputs, prompts_BT.shape[1]
      )

    decodes_BNT, scores_BN = self._decode_fn(  # type: ignore[misc]
      inputs=prompts_BT if prompt_with_targets else jnp.zeros_like(prompts_BT),
      cache=self._initial_cache(params, batch),
      tokens_to_logits=tokens_to_logits,
      eos_id=self.output_vocabulary.eos_id,
      num_decodes=num_decodes,
      **options,
    )
    if return_all_decodes:
      return decodes_BNT, {"scores": scores_BN}
    return decodes_BNT[:, -1], {"scores": scores_BN[:, -1]}

  def score_batch(
    self, params: PyTree, batch: Batch, return_intermediates: bool = False
  ) -> jax.Array | tuple[jax.Array, Mapping[str, Any]]:
    """Returns the log likelihood of each example's targets, [B], padding left out.

    With `return_intermediates`, returns also what the module sowed, and the decoder's logits are
    not among it unless the module sows them.
    """
    mutable: Any = ["intermediates"] if return_intermediates else False
    outputs = self._compute_logits(params, batch, mutable=mutable)
    logits_BTV, collections = outputs if return_intermediates else (outputs, {})
    targets_BT = batch["decoder_target_tokens"]
    weights_BT = batch.get("decoder_loss_weights", targets_BT > 0)
    log_probs_BTV = jax.nn.log_softmax(logits_BTV)
    scores_BT = jnp.take_along_axis(log_probs_BTV, targets_BT[..., None], axis=-1)[..., 0]
    scores_B = jnp.sum(scores_BT * weights_BT, axis=-1)
    if return_intermediates:
      return scores_B, collections.get("intermediates", {})
    return scores_B
