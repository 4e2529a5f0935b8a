"""The decoder-only model: a language model of sequences that contain inputs and targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import freeze
from jaxtyping import Array, Int

from rosetta_t5 import decoding
from rosetta_t5.adapters import Adapter
from rosetta_t5.argument_types import NonNegativeNumber, Positive, Rate
from rosetta_t5.models.base_model import Batch, LazySeqioClass, PyTree, Shapes
from rosetta_t5.models.base_transformer import BaseTransformerModel
from rosetta_t5.models.decoding_model import DecodingStart
from rosetta_t5.training import losses
from rosetta_t5.training.optimizers.optimizer_def import OptimizerDef

_MASK = "decoder_causal_attention"


class DecoderOnlyModel(BaseTransformerModel):
  """A decoder-only model (T5X: DecoderOnlyModel) of targets, or of inputs and targets.

  A batch has inputs and targets in one sequence. `decoder_loss_weights` exclude the inputs from the
  loss. `decoder_causal_attention` is 1 at the inputs and the first target; at these positions
  `decoder_input_tokens`, which is shifted right, has the start token and the inputs.
  """

  FEATURE_CONVERTER_CLS = LazySeqioClass("DecoderFeatureConverter")
  _inputs_bidirectional_attention = False

  def __init__(
    self,
    module: nn.Module,
    vocabulary: Any,
    optimizer_def: OptimizerDef | None,
    decode_fn: Callable[..., Any] = decoding.temperature_sample,
    inputs_bidirectional_attention: bool = False,
    feature_converter_cls: Any = None,
    label_smoothing: Rate = 0.0,
    z_loss: NonNegativeNumber = 0.0,
    loss_normalizing_factor: losses.LossNormalizingFactor | None = None,
    loss_chunk_length: Positive | None = None,
    aux_loss_factor: NonNegativeNumber = 0.0,
    router_z_loss_factor: NonNegativeNumber = 0.0,
    adapter: Adapter | None = None,
  ):
    """Builds the model; see `BaseTransformerModel` for the arguments that are not described here.

    Args:
      module: the network, called like `networks.transformer.DecoderWrapper`.
      vocabulary: the SeqIO vocabulary of inputs and targets.
      optimizer_def: the optimizer.
      decode_fn: the decode function that `predict_batch` calls; it must accept `initial_index`.
      inputs_bidirectional_attention: whether all inputs see each other (prefix LM, Raffel et al.,
        2020); otherwise every position sees only those before it.
      feature_converter_cls: a feature converter to use instead of SeqIO's DecoderFeatureConverter,
        such as its PrefixLMFeatureConverter.
      label_smoothing: see `BaseTransformerModel`.
      z_loss: see `BaseTransformerModel`.
      loss_normalizing_factor: see `BaseTransformerModel`.
      loss_chunk_length: see `BaseTransformerModel`.
      aux_loss_factor: see `BaseTransformerModel`.
      router_z_loss_factor: see `BaseTransformerModel`.
      adapter: see `BaseTransformerModel`.
    """
    if feature_converter_cls is not None:
      self.FEATURE_CONVERTER_CLS = feature_converter_cls
    self._inputs_bidirectional_attention = inputs_bidirectional_attention
    network = (module, vocabulary, vocabulary, optimizer_def, decode_fn)
    loss_settings = (label_smoothing, z_loss, loss_normalizing_factor, loss_chunk_length)
    super().__init__(*network, *loss_settings, aux_loss_factor, router_z_loss_factor, adapter)

  def get_initial_variables(
    self, rng: jax.Array, input_shapes: Shapes, input_types: Mapping[str, Any] | None = None
  ) -> Mapping[str, PyTree]:
    """Returns the initial variables; the same key gives T5X's parameters."""
    name = "decoder_input_tokens"
    tokens = jnp.ones(input_shapes[name], (input_types or {}).get(name, jnp.int32))
    # T5X's decoders need no other arguments here, and users' may have no others.
    return freeze(self.module.init(rng, tokens, tokens, enable_dropout=False))

  def _get_decoder_causal_attention(self, batch: Batch) -> jax.Array | None:
    """Returns 1 for the positions that all see each other, [B, T]; None in a causal model."""
    if not self._inputs_bidirectional_attention:
      return None
    return _mask(batch)

  @property
  def is_prefix_lm(self) -> bool:
    """Whether all inputs see each other."""
    return self._inputs_bidirectional_attention

  def _module_arguments(self, batch: Batch) -> tuple[list[jax.Array], dict[str, Any]]:
    return [batch["decoder_input_tokens"], batch["decoder_target_tokens"]], {
      "decoder_segment_ids": batch.get("decoder_segment_ids"),
      "decoder_positions": batch.get("decoder_positions"),
      "decoder_causal_attention": self._get_decoder_causal_attention(batch),
    }

  def _compute_kv_cache(
    self, params: PyTree, inputs: jax.Array, causal_attention_mask: jax.Array
  ) -> tuple[Any, ...]:
    """Returns a cache with all inputs but the last one, and the last one's position, [B].

    With experts, their intermediates are returned too.

    The last input is decoded in the first step, which needs its logits.

    Args:
      params: the parameters.
      inputs: [B, T] inputs, shifted right by one position and followed by padding.
      causal_attention_mask: [B, P] 1 where `inputs` has the start token or an input. Only P positions
        are computed; the cache has T.
    """
    pad_id = self.pad_id
    lengths_B = jnp.sum(inputs[:, 1:] != pad_id, axis=-1)
    ones = jnp.ones_like(inputs)
    cache = self._empty_cache(params, ones, ones)
    _, variables = self.module.apply(
      {"params": params, "cache": cache},
      decoder_input_tokens=inputs[:, : causal_attention_mask.shape[1]],
      # Targets that are not padding are visible: the start token must be, too.
      decoder_target_tokens=jnp.where(causal_attention_mask != 0, pad_id + 1, pad_id),
      decoder_causal_attention=self._get_decoder_causal_attention({_MASK: causal_attention_mask}),
      enable_dropout=False,
      prefill=True,
      prefill_lengths=lengths_B,
      mutable=["cache", *(["intermediates"] if self.has_experts else [])],
    )
    sown = (variables.get("intermediates", {}),) if self.has_experts else ()
    return variables["cache"], lengths_B, *sown

  def predict_batch_with_aux(
    self,
    params: PyTree,
    batch: Batch,
    rng: jax.Array | None = None,
    *,
    return_all_decodes: bool = False,
    num_decodes: Positive = 1,
    decoder_params: Mapping[str, Any] | None = None,
  ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
    """Returns the continuations of the inputs, and their scores.

    Args:
      params: the parameters.
      batch: `decoder_input_tokens` [B, T], whose targets are ignored, and `decoder_causal_attention`
        [B, P], 1 at the inputs and the first target. P may be less than T if all of these are
        before P. T limits the total length of inputs and decodes.
      rng: the random key for sampling.
      return_all_decodes: whether to return all decodes, [B, N, T], the best last, or the best,
        [B, T].
      num_decodes: N.
      decoder_params: further arguments of `decode_fn`.

    Returns:
      (decodes without the inputs, {"scores": [B, N] or [B]}). With experts, the second also has
      "tokens_left_behind", [B]: the fraction of the inputs that no expert computed.

    Raises:
      ValueError: the batch does not mark the inputs, or `decode_fn` does not accept an argument.
    """
    start = self.start_decoding(params, batch)
    decodes, aux = self._decode(params, start, num_decodes, return_all_decodes, decoder_params, rng)
    assert start.cache_index is not None
    return remove_prefix(decodes, start.cache_index, self.pad_id), aux

  def start_decoding(self, params: PyTree, batch: Batch) -> DecodingStart:
    """Fills the cache with the inputs; see `predict_batch_with_aux` for the arguments."""
    mask_BP, tokens_BT = _mask(batch), batch["decoder_input_tokens"]
    missing = tokens_BT.shape[1] - mask_BP.shape[1]
    is_input_BT = jnp.pad(mask_BP, ((0, 0), (0, missing))) != 0
    inputs_BT = jnp.where(is_input_BT, tokens_BT, self.pad_id)
    cache, lengths_B, *sown = self._compute_kv_cache(params, inputs_BT, mask_BP)
    return DecodingStart(inputs_BT, cache, lengths_B, {}, sown[0] if sown else {})


def _mask(batch: Batch) -> jax.Array:
  """Returns the positions of the inputs, [B, P]."""
  if _MASK not in batch:
    raise ValueError(
      f"the batch must have {_MASK}, which distinguishes inputs from targets, for predictions and for "
      f"inputs_bidirectional_attention = True (it has {', '.join(sorted(batch))}): set "
      "task_feature_lengths for both 'inputs' and 'targets'"
    )
  return batch[_MASK]


def remove_prefix(
  sequence: Int[Array, "B *N T"], prefix_length: Int[Array, " B"], pad_id: int = 0
) -> Int[Array, "B *N T"]:
  """Returns the sequences without their first tokens, shifted to the left and padded.

  Args:
    sequence: token ids.
    prefix_length: the number of tokens to remove from each example.
    pad_id: the token that is padding.
  """

  def remove_from_example(tokens: jax.Array, length: jax.Array) -> jax.Array:
    is_kept = jnp.arange(tokens.shape[-1]) >= length
    kept = jnp.where(jnp.broadcast_to(is_kept, tokens.shape), tokens, pad_id)
    return jnp.roll(kept, -length, axis=-1)

  return jax.vmap(remove_from_example)(sequence, prefix_length)
