"""The decoder-only model: a language model over inputs and targets put together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from rosetta_t5 import decoding
from rosetta_t5.models.base import BaseTransformerModel, Batch, LazySeqioClass, PyTree
from rosetta_t5.models.decode_call import accepts, call_decode_fn
from rosetta_t5.networks.layers.decoding_cache import KEPT
from rosetta_t5.training import losses

_MASK = "decoder_causal_attention"


class DecoderOnlyModel(BaseTransformerModel):
  """A decoder-only model (T5X: DecoderOnlyModel), of targets alone or of inputs and targets.

  A batch has both in one sequence. `decoder_loss_weights` leave the inputs out of the loss, and
  `decoder_causal_attention` is 1 at the inputs and the first target, whose positions in
  `decoder_input_tokens`, one to the right, are the start token and the inputs.
  """

  FEATURE_CONVERTER_CLS = LazySeqioClass("DecoderFeatureConverter")

  def __init__(
    self,
    module: nn.Module,
    vocabulary: Any,
    optimizer_def: Any,
    decode_fn: Callable[..., Any] = decoding.temperature_sample,
    inputs_bidirectional_attention: bool = False,
    feature_converter_cls: Any = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    loss_normalizing_factor: float | int | str | losses.SpecialLossNormalizingFactor | None = None,
    loss_chunk_length: int | None = None,
  ):
    """Builds the model; see `BaseTransformerModel` for the arguments not named here.

    Args:
      module: the network, called as `networks.decoder_only.DecoderWrapper`.
      vocabulary: the SeqIO vocabulary of inputs and targets.
      optimizer_def: the optimizer.
      decode_fn: how `predict_batch` decodes. It must take `initial_index`.
      inputs_bidirectional_attention: whether the inputs all see each other (prefix LM, Raffel et al.,
        2020); else every position sees those before it.
      feature_converter_cls: another feature converter than SeqIO's DecoderFeatureConverter, such as
        its PrefixLMFeatureConverter.
      label_smoothing: see `BaseTransformerModel`.
      z_loss: see `BaseTransformerModel`.
      loss_normalizing_factor: see `BaseTransformerModel`.
      loss_chunk_length: see `BaseTransformerModel`.
    """
    if feature_converter_cls is not None:
      self.FEATURE_CONVERTER_CLS = feature_converter_cls
    self._inputs_bidirectional_attention = inputs_bidirectional_attention
    super().__init__(
      module,
      input_vocabulary=vocabulary,
      output_vocabulary=vocabulary,
      optimizer_def=optimizer_def,
      decode_fn=decode_fn,
      label_smoothing=label_smoothing,
      z_loss=z_loss,
      loss_normalizing_factor=loss_normalizing_factor,
      loss_chunk_length=loss_chunk_length,
    )

  def get_initial_variables(
    self,
    rng: jax.Array,
    input_shapes: Mapping[str, tuple[int, ...]],
    input_types: Mapping[str, Any] | None = None,
  ) -> Mapping[str, PyTree]:
    """Returns the initial variables; the same key gives T5X's parameters."""
    name = "decoder_input_tokens"
    tokens = jnp.ones(input_shapes[name], (input_types or {}).get(name, jnp.int32))
    return self.module.init(rng, tokens, tokens, enable_dropout=False)

  def _get_decoder_causal_attention(self, batch: Batch) -> jax.Array | None:
    """Returns which positions all see each other, [B, T]; None in a causal model."""
    if not self._inputs_bidirectional_attention:
      return None
    if _MASK not in batch:
      raise ValueError(
        f"DecoderOnlyModel.inputs_bidirectional_attention = True needs the feature {_MASK}, which is "
        f"not in the batch (it has {', '.join(sorted(batch))}): give task_feature_lengths both "
        "'inputs' and 'targets', or set it to False"
      )
    return batch[_MASK]

  def _compute_logits(
    self,
    params: PyTree,
    batch: Batch,
    dropout_rng: jax.Array | None = None,
    mutable: Any = False,
    other_variables: PyTree | None = None,
    **module_options: Any,
  ) -> Any:
    return self.module.apply(
      {"params": params, **(other_variables or {})},
      batch["decoder_input_tokens"],
      batch["decoder_target_tokens"],
      decoder_segment_ids=batch.get("decoder_segment_ids"),
      decoder_positions=batch.get("decoder_positions"),
      decoder_causal_attention=self._get_decoder_causal_attention(batch),
      decode=False,
      enable_dropout=dropout_rng is not None,
      rngs=None if dropout_rng is None else {"dropout": dropout_rng},
      mutable=mutable,
      **module_options,
    )

  def _compute_logits_from_slice(
    self,
    decoding_state: Any,
    params: PyTree,
    max_decode_length: int,
    kept_variables: PyTree | None = None,
  ) -> tuple[jax.Array, PyTree]:
    """Returns the logits after one more token of every decode, [B·N, V], and the new cache."""
    logits, variables = self.module.apply(
      {"params": params, "cache": decoding_state.cache, **(kept_variables or {})},
      decoding_state.cur_token,
      decoding_state.cur_token,
      enable_dropout=False,
      decode=True,
      max_decode_length=max_decode_length,
      mutable=["cache"],
    )
    return jnp.squeeze(logits, axis=1), variables["cache"]

  def _compute_kv_cache(
    self, params: PyTree, inputs: jax.Array, causal_attention_mask: jax.Array
  ) -> tuple[PyTree, jax.Array]:
    """Returns a cache filled with the inputs but for the last one, and that one's position, [B].

    The last input is left for the first step of decoding, which needs its logits.

    Args:
      params: the parameters.
      inputs: [B, T] inputs, shifted right by one position; 0 after them.
      causal_attention_mask: [B, P] 1 where `inputs` has the start token or an input. Only P positions
        are computed; the cache holds T.
    """
    lengths_B = jnp.sum(inputs[:, 1:] != 0, axis=-1)
    ones = jnp.ones_like(inputs)
    _, variables = self.module.apply(
      {"params": params}, ones, ones, enable_dropout=False, decode=True, mutable=["cache"]
    )
    _, variables = self.module.apply(
      {"params": params, "cache": variables["cache"]},
      inputs[:, : causal_attention_mask.shape[1]],
      # Stands for the targets, of which it tells the padding: the start token is to be seen too.
      causal_attention_mask,
      decoder_causal_attention=self._get_decoder_causal_attention({_MASK: causal_attention_mask}),
      enable_dropout=False,
      prefill=True,
      prefill_lengths=lengths_B,
      mutable=["cache"],
    )
    return variables["cache"], lengths_B

  def _kept_variables(self, params: PyTree, cache: PyTree, tokens_BT: jax.Array) -> PyTree:
    """Returns what a step computes that is the same in every step; {} if there is no such thing."""
    token_B1 = tokens_BT[:, :1]
    _, variables = self.module.apply(
      {"params": params, "cache": cache},
      token_B1,
      token_B1,
      enable_dropout=False,
      decode=True,
      max_decode_length=tokens_BT.shape[1],
      mutable=["cache", KEPT],
    )
    return {name: variables[name] for name in (KEPT,) if name in variables}

  def predict_batch_with_aux(
    self,
    params: PyTree,
    batch: Batch,
    rng: jax.Array | None = None,
    *,
    return_all_decodes: bool = False,
    num_decodes: int = 1,
    decoder_params: Mapping[str, Any] | None = None,
  ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
    """Returns what the model writes after the inputs, and its scores.

    Args:
      params: the parameters.
      batch: `decoder_input_tokens` [B, T], of which the targets are left out, and
        `decoder_causal_attention` [B, P], 1 at the inputs and the first target, with P < T where all
        these come before P; T limits inputs and decodes together.
      rng: the key for sampling.
      return_all_decodes: whether all decodes are returned, [B, N, T], the best last; else the best,
        [B, T].
      num_decodes: N.
      decoder_params: further arguments of `decode_fn`.

    Returns:
      (decodes without the inputs, {"scores": [B, N] or [B]}).

    Raises:
      ValueError: the batch does not tell inputs from targets, or `decode_fn` lacks an argument.
    """
    if _MASK not in batch:
      raise ValueError(
        f"the batch has no {_MASK}, so that inputs and targets cannot be told apart: give "
        "task_feature_lengths both 'inputs' and 'targets'"
      )
    mask_BP, tokens_BT = batch[_MASK], batch["decoder_input_tokens"]
    missing = tokens_BT.shape[1] - mask_BP.shape[1]
    inputs_BT = tokens_BT * jnp.pad(mask_BP, ((0, 0), (0, missing)))
    cache, lengths_B = self._compute_kv_cache(params, inputs_BT, mask_BP)
    optional = {
      "cache_offset": int(getattr(self.module, "scan_layers", False)),
      "initial_index": lengths_B,
    }
    kept: dict[str, Any] = {}
    if accepts(self._compute_logits_from_slice, "kept_variables"):
      kept["kept_variables"] = self._kept_variables(params, cache, inputs_BT)
    decodes_BNT, scores_BN = call_decode_fn(
      self.decode_fn,  # type: ignore[arg-type]
      decoder_params,
      rng,
      optional,
      inputs=inputs_BT,
      cache=cache,
      tokens_to_logits=functools.partial(
        self._compute_logits_from_slice,
        params=params,
        max_decode_length=inputs_BT.shape[1],
        **kept,
      ),
      eos_id=self.output_vocabulary.eos_id,
      num_decodes=num_decodes,
    )
    if return_all_decodes:
      return remove_prefix(decodes_BNT, lengths_B), {"scores": scores_BN}
    return remove_prefix(decodes_BNT[:, -1], lengths_B), {"scores": scores_BN[:, -1]}


def remove_prefix(
  sequence: Int[Array, "B *N T"], prefix_length: Int[Array, " B"]
) -> Int[Array, "B *N T"]:
  """Returns the sequences without their first tokens, moved to the left, with 0 after them.

  Args:
    sequence: token ids, padded with 0.
    prefix_length: how many tokens to remove of each example.
  """

  def of_one_example(tokens: jax.Array, length: jax.Array) -> jax.Array:
    is_kept = jnp.arange(tokens.shape[-1]) >= length
    return jnp.roll(jnp.where(jnp.broadcast_to(is_kept, tokens.shape), tokens, 0), -length, axis=-1)

  return jax.vmap(of_one_example)(sequence, prefix_length)
