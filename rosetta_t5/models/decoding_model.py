"""Decoding of transformer models: the work that is done once, and the steps after it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rosetta_t5 import decoding
from rosetta_t5.models.base_model import BaseModel, Batch, PyTree, accepts, call_decode_fn
from rosetta_t5.models.batch_metrics import fraction_left_behind
from rosetta_t5.networks.layers.decoding_cache import PRECOMPUTED
from rosetta_t5.networks.other_networks import setting_of


class DecodingStart(NamedTuple):
  """What a decode of B examples begins with.

  Attributes:
    prompts: [B, T] the tokens that decodes begin with, shifted right; T limits the decodes.
    cache: the decoding cache.
    cache_index: [B] the number of positions in the cache; None for an empty cache.
    context: the arrays that each decoding step reads besides, {name: [B, ...]}.
    sown: the intermediates of experts.
  """

  prompts: jax.Array
  cache: PyTree
  cache_index: jax.Array | None
  context: dict[str, jax.Array]
  sown: Any


class DecodingModel(BaseModel):
  """The decoding that encoder-decoder and decoder-only models share."""

  decode_fn: Any
  output_vocabulary: Any
  # The module's method that computes a decoding step; None for `__call__`.
  _decode_method: Any = None

  @property
  def start_id(self) -> int:
    """The token that starts texts, by the network's config; padding if it does not say."""
    token = setting_of(self.network_config, "decoder_start_token_id")
    return token if isinstance(token, int) else self.pad_id

  def _decode_step(
    self, variables: PyTree, context: Any, tokens_N1: jax.Array, length: int, mutable: list[str]
  ) -> Any:
    """Returns the logits after one more token of every sequence, and the mutable collections."""
    return self.module.apply(
      variables,
      *context,
      tokens_N1,
      tokens_N1,
      enable_dropout=False,
      decode=True,
      max_decode_length=length,
      mutable=mutable,
      method=self._decode_method,
    )

  def _empty_cache(self, params: PyTree, *inputs: jax.Array, **named_inputs: jax.Array) -> PyTree:
    """Returns the decoding cache for inputs of these shapes."""
    options: Any = {"decode": True, "enable_dropout": False, "mutable": ["cache"], **named_inputs}
    return self.module.apply({"params": params}, *inputs, **options)[1]["cache"]

  def _compute_logits_from_slice(
    self,
    decoding_state: Any,
    params: PyTree,
    max_decode_length: int,
    precomputed_variables: PyTree | None = None,
    **context: jax.Array,
  ) -> tuple[jax.Array, PyTree]:
    """Returns the logits after one more token of every sequence, [N, V], and the new cache."""
    variables = {"params": params, "cache": decoding_state.cache, **(precomputed_variables or {})}
    logits_N1V, variables = self._decode_step(
      variables, context.values(), decoding_state.cur_token, max_decode_length, ["cache"]
    )
    return jnp.squeeze(logits_N1V, axis=1), variables["cache"]

  def start_decoding(self, params: PyTree, batch: Batch) -> DecodingStart:
    """Returns what a decode of the batch's inputs begins with, after the work that is done once."""
    raise NotImplementedError

  def step_arrays(self, params: PyTree, start: DecodingStart) -> dict[str, PyTree]:
    """Returns the arguments of `next_logits` that are the same in all steps: `context`, and precomputed ones."""
    # Subclasses that were written for T5X override this method without the argument, and a module
    # that is not a linen module has no collection for these variables.
    step = self._compute_logits_from_slice
    if not isinstance(self.module, nn.Module) or not accepts(step, "precomputed_variables"):
      return start.context
    first, length = jnp.zeros((start.prompts.shape[0], 1), jnp.int32), start.prompts.shape[1]
    variables, mutable = {"params": params, "cache": start.cache}, ["cache", PRECOMPUTED]
    _, variables = self._decode_step(variables, start.context.values(), first, length, mutable)
    precomputed = {name: x for name, x in variables.items() if name != "cache"}
    return {**start.context, "precomputed_variables": precomputed}

  def next_logits(
    self, params: PyTree, length: int, arrays: Mapping[str, PyTree], state: decoding.DecodingState
  ) -> tuple[Float[Array, "N V"], PyTree]:
    """Returns the logits after one more token of N sequences, and the new cache.

    Args:
      params: the parameters.
      length: the number of positions in the cache.
      arrays: those of `step_arrays`.
      state: the tokens, and the cache.
    """
    # By name, because subclasses that were written for T5X have another order.
    options: dict[str, Any] = {"params": params, "max_decode_length": length, **arrays}
    return self._compute_logits_from_slice(state, **options)

  def _decode(
    self,
    params: PyTree,
    start: DecodingStart,
    num_decodes: int,
    return_all_decodes: bool,
    decoder_params: Mapping[str, Any] | None,
    rng: jax.Array | None,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the decodes and their auxiliary values; see `predict_batch_with_aux`.

    Args:
      params: the parameters.
      start: what the decodes begin with.
      num_decodes: N, the number of decodes to compute for each example.
      return_all_decodes: whether to return all decodes, [B, N, T], the best last, with scores [B, N],
        or the best, [B, T], with scores [B].
      decoder_params: further arguments of `decode_fn`.
      rng: the random key for sampling.
    """
    # Each beam or sample attends to its own copy of the encoded inputs.
    copies = {n: decoding.flat_batch_beam_expand(x, num_decodes) for n, x in start.context.items()}
    arrays = {**self.step_arrays(params, start), **copies}
    step = functools.partial(self.next_logits, params, start.prompts.shape[1], arrays)
    is_scanned = getattr(self.module, "scan_layers", False)
    optional: dict[str, Any] = {"cache_offset": 1 if is_scanned else 0, "pad_id": self.pad_id}
    if start.cache_index is not None:
      optional["initial_index"] = start.cache_index
    prompts_BT = start.prompts
    if self.start_id != self.pad_id:  # Penalties count the token that the network reads there.
      first_B = jnp.where(prompts_BT[:, 0] == self.pad_id, self.start_id, prompts_BT[:, 0])
      prompts_BT = prompts_BT.at[:, 0].set(first_B)
    decodes_BNT, scores_BN = call_decode_fn(
      self.decode_fn,
      decoder_params,
      rng,
      optional,
      inputs=prompts_BT,
      cache=start.cache,
      tokens_to_logits=step,
      eos_id=self.output_vocabulary.eos_id or 1,
      num_decodes=num_decodes,
    )
    aux = fraction_left_behind(start.sown)
    if return_all_decodes:
      return decodes_BNT, {"scores": scores_BN, **aux}
    return decodes_BNT[:, -1], {"scores": scores_BN[:, -1], **aux}
