"""The encoder-decoder model: T5's loss, scores and predictions around a linen module."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float

from rosetta_t5 import decoding
from rosetta_t5.adapters import Adapter
from rosetta_t5.argument_types import NonNegativeNumber, Positive, Rate
from rosetta_t5.models.base_model import Batch, LazySeqioClass, PyTree, has_argument
from rosetta_t5.models.base_transformer import BaseTransformerModel
from rosetta_t5.models.decoding_model import DecodingStart
from rosetta_t5.networks.layers.stack import CROSS_ATTENTION
from rosetta_t5.training import losses
from rosetta_t5.training.optimizers.optimizer_def import OptimizerDef

_OPTIONAL_FEATURES = (
  "encoder_positions",
  "decoder_positions",
  "encoder_segment_ids",
  "decoder_segment_ids",
)


@flax.struct.dataclass
class DecoderParams:
  """The defaults of `EncoderDecoderModel.predict_batch`.

  Attributes:
    return_all_decodes: whether all decodes are returned, or only the best.
    num_decodes: the number of decodes: beams, or samples.
  """

  return_all_decodes: bool = False
  num_decodes: Positive = 1


class EncoderDecoderModel(BaseTransformerModel):
  """T5 (T5X: EncoderDecoderModel)."""

  FEATURE_CONVERTER_CLS = LazySeqioClass("EncDecFeatureConverter")
  _default_decoder_params = DecoderParams()

  def __init__(
    self,
    module: nn.Module,
    input_vocabulary: Any,
    output_vocabulary: Any,
    optimizer_def: OptimizerDef | None,
    decode_fn: Callable[..., Any] = decoding.beam_search,
    feature_converter_cls: Any = None,
    label_smoothing: Rate = 0.0,
    z_loss: NonNegativeNumber = 0.0,
    loss_normalizing_factor: losses.LossNormalizingFactor | None = None,
    default_decoder_params: DecoderParams | None = None,
    loss_chunk_length: Positive | None = None,
    aux_loss_factor: NonNegativeNumber = 0.0,
    router_z_loss_factor: NonNegativeNumber = 0.0,
    adapter: Adapter | None = None,
  ):
    """Builds the model; see `BaseTransformerModel` for the arguments that are not described here.

    Args:
      module: the network, with methods `encode` and `decode` like `networks.transformer.Transformer`.
      input_vocabulary: the SeqIO vocabulary of the inputs.
      output_vocabulary: the SeqIO vocabulary of the targets.
      optimizer_def: the optimizer.
      decode_fn: the decode function that `predict_batch` calls.
      feature_converter_cls: a feature converter to use instead of SeqIO's EncDecFeatureConverter.
      label_smoothing: see `BaseTransformerModel`.
      z_loss: see `BaseTransformerModel`.
      loss_normalizing_factor: see `BaseTransformerModel`.
      default_decoder_params: how many decodes `predict_batch` computes and returns.
      loss_chunk_length: see `BaseTransformerModel`.
      aux_loss_factor: see `BaseTransformerModel`.
      router_z_loss_factor: see `BaseTransformerModel`.
      adapter: see `BaseTransformerModel`.
    """
    if feature_converter_cls is not None:
      self.FEATURE_CONVERTER_CLS = feature_converter_cls
    self._default_decoder_params = default_decoder_params or DecoderParams()
    network = (module, input_vocabulary, output_vocabulary, optimizer_def, decode_fn)
    loss_settings = (label_smoothing, z_loss, loss_normalizing_factor, loss_chunk_length)
    super().__init__(*network, *loss_settings, aux_loss_factor, router_z_loss_factor, adapter)

  def _module_arguments(self, batch: Batch) -> tuple[list[jax.Array], dict[str, Any]]:
    names = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    return [batch[name] for name in names], {name: batch.get(name) for name in _OPTIONAL_FEATURES}

  @property
  def _decode_method(self) -> Callable[..., Any]:
    return self.module.decode

  def _compute_kv_cache(
    self,
    params: PyTree,
    encoded_inputs: jax.Array,
    encoder_input_tokens: jax.Array,
    decoder_input_tokens: jax.Array,
    prefill_decoder_prompt: bool = False,
  ) -> tuple[PyTree, jax.Array | None]:
    """Returns a cache as long as the targets, and the lengths of its prompts, [B], or None.

    Args:
      params: the parameters.
      encoded_inputs: the encoder's output.
      encoder_input_tokens: the inputs, whose padding is masked.
      decoder_input_tokens: the prompts, if any.
      prefill_decoder_prompt: whether to write the prompts into the cache.
    """
    ones = jnp.ones_like(decoder_input_tokens)
    cache = self._empty_cache(
      params,
      encoder_input_tokens=jnp.ones_like(encoder_input_tokens),
      decoder_input_tokens=ones,
      decoder_target_tokens=ones,
    )
    if not prefill_decoder_prompt:
      return cache, None
    lengths_B = jnp.sum(decoder_input_tokens != self.pad_id, axis=1)
    _, variables = self.module.apply(
      {"params": params, "cache": cache},
      encoded=encoded_inputs,
      encoder_input_tokens=encoder_input_tokens,
      decoder_input_tokens=decoder_input_tokens,
      decoder_target_tokens=ones,
      enable_dropout=False,
      prefill=True,
      prefill_lengths=lengths_B,
      mutable=["cache"],
      method=self.module.decode,
    )
    cache = variables["cache"]
    if "position_embedder" in cache.get("decoder", {}):
      # Flaxformer's decoder counts positions here, and its prefill does not set the count.
      cache["decoder"]["position_embedder"]["position_embedder_index"] = lengths_B
    return cache, lengths_B

  def embed_batch(
    self, params: PyTree, batch: Batch, pooling: str = "mean", dropout_rng: Array | None = None
  ) -> Float[Array, "B D"] | Float[Array, "B S D"]:
    """Returns one float32 vector of each text, or of each of its tokens.

    Args:
      params: the parameters; those of the encoder are enough.
      batch: `encoder_input_tokens` [B, S].
      pooling: "mean" of the encoder's outputs for all tokens that are not padding, or "first" for
        that of the first token; "none" for all of them, which are zeros for padding.
      dropout_rng: the random key for dropout; None disables dropout.
    """
    tokens_BS = batch["encoder_input_tokens"]
    encoded_BSD: jax.Array = self.module.apply(
      {"params": params},
      tokens_BS,
      enable_dropout=dropout_rng is not None,
      rngs=None if dropout_rng is None else {"dropout": dropout_rng},
      method=self.module.encode,
    ).astype(jnp.float32)
    encoded_BSD = encoded_BSD[:, -tokens_BS.shape[1] :]  # after the vectors of a trained prompt
    if pooling == "first":
      return encoded_BSD[:, 0]
    real_BS1 = (tokens_BS != self.pad_id)[..., None]
    if pooling == "none":
      return encoded_BSD * real_BS1
    return jnp.sum(encoded_BSD * real_BS1, 1) / jnp.maximum(jnp.sum(real_BS1, 1), 1)

  def cross_attention(self, params: PyTree, batch: Batch) -> Float[Array, "B L T S"]:
    """Returns what the prediction of each target attends to: the mean weights of each layer's heads.

    Only layers of this package's networks show it; L is 0 in others. The weights of a target's padding
    have no meaning.

    Args:
      params: the parameters.
      batch: the inputs and the targets.
    """
    _, variables = self._compute_logits(params, batch, mutable=[CROSS_ATTENTION])
    sown = flatten_dict(variables.get(CROSS_ATTENTION, {}))
    paths = sorted(sown, key=lambda path: [int(n) for n in re.findall(r"\d+", "/".join(path))])
    batch_size, targets = batch["decoder_target_tokens"].shape
    inputs = batch["encoder_input_tokens"].shape[1]
    # [R, B, T, S] of each: R is 1, or the number of layers that were scanned, of which other layers are between.
    weights = [sown[path][0].reshape(-1, *sown[path][0].shape[-3:]) for path in paths]
    if not weights:
      return jnp.zeros((batch_size, 0, targets, inputs))
    # The vectors of a trained prompt are before the inputs.
    weights_RPBTS = jnp.stack(weights, axis=1)[..., -inputs:]
    return weights_RPBTS.reshape(-1, *weights_RPBTS.shape[2:]).swapaxes(0, 1)

  def predict_batch_with_aux(
    self,
    params: PyTree,
    batch: Batch,
    rng: jax.Array | None = None,
    decoder_params: Mapping[str, Any] | None = None,
    return_all_decodes: bool | None = None,
    num_decodes: Positive | None = None,
    prompt_with_targets: bool = False,
  ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
    """Returns decodes of the inputs and their scores.

    Args:
      params: the parameters.
      batch: `encoder_input_tokens` [B, S] and `decoder_input_tokens` [B, T]; T limits the decodes.
      rng: the random key for sampling.
      decoder_params: further arguments of `decode_fn`, such as `alpha`, `max_decode_len`,
        `temperature` or `decode_rng`; an `eos_id`, or a list of them, overrides the vocabulary's.
      return_all_decodes: whether to return all decodes, [B, N, T], the best last, or the best,
        [B, T]; None for the model's default.
      num_decodes: N; None for the model's default.
      prompt_with_targets: whether decodes begin with `decoder_input_tokens` without their end token.

    Returns:
      (decodes, {"scores": [B, N] or [B]}). With experts, the second also has "tokens_left_behind", [B]:
      the fraction of the inputs that no expert computed, because its slots were taken.

    Raises:
      ValueError: `decode_fn` does not accept an argument of `decoder_params` or one that it needs.
    """
    defaults = self._default_decoder_params
    num_decodes = defaults.num_decodes if num_decodes is None else num_decodes
    if return_all_decodes is None:
      return_all_decodes = defaults.return_all_decodes
    start = self.start_decoding(params, batch, prompt_with_targets)
    return self._decode(params, start, num_decodes, return_all_decodes, decoder_params, rng)

  def start_decoding(
    self, params: PyTree, batch: Batch, prompt_with_targets: bool = False
  ) -> DecodingStart:
    """Encodes the inputs; see `predict_batch_with_aux` for the arguments."""
    inputs_BS, prompts_BT = batch["encoder_input_tokens"], batch["decoder_input_tokens"]
    # The end token is removed from prompts, since it would end the decode.
    is_prompt = (prompts_BT != self.output_vocabulary.eos_id) & prompt_with_targets
    prompts_BT = jnp.where(is_prompt, prompts_BT, self.pad_id)
    sown: Any = {}
    options = {"mutable": ["intermediates"]} if self.has_experts else {}
    encoded_BSD: Any = self.module.apply(
      {"params": params}, inputs_BS, enable_dropout=False, method=self.module.encode, **options
    )
    if self.has_experts:
      encoded_BSD, sown = encoded_BSD
    # A function with only `**kwargs` could ignore the index and decode the prompt a second time.
    can_prefill = has_argument(self.decode_fn, "initial_index") and has_argument(
      self.module.decode, "prefill"
    )
    cache, index_B = self._compute_kv_cache(
      params, encoded_BSD, inputs_BS, prompts_BT, prefill_decoder_prompt=can_prefill
    )
    context = {"encoded_inputs": encoded_BSD, "raw_inputs": inputs_BS}
    return DecodingStart(prompts_BT, cache, index_B, context, sown)
