"""The encoder of an encoder-decoder model alone, and its training on pairs of texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.core import freeze
from jaxtyping import Array, Float

from rosetta_t5.adapters import Adapter
from rosetta_t5.argument_types import PositiveNumber
from rosetta_t5.models.base_model import Batch, PyTree, Shapes
from rosetta_t5.models.batch_metrics import compute_base_metrics
from rosetta_t5.models.encoder_decoder import EncoderDecoderModel
from rosetta_t5.training import losses
from rosetta_t5.training.optimizers.optimizer_def import OptimizerDef


class EncoderModel(EncoderDecoderModel):
  """An encoder-decoder model whose parameters are those of its encoder; it computes vectors and predicts nothing."""

  def get_initial_variables(
    self, rng: jax.Array, input_shapes: Shapes, input_types: Mapping[str, Any] | None = None
  ) -> Mapping[str, PyTree]:
    """Returns the initial variables of the encoder and its embedding table."""
    tokens = jnp.ones(input_shapes["encoder_input_tokens"], jnp.int32)
    encode = self.module.encode
    return freeze(self.module.init(rng, tokens, enable_dropout=False, method=encode))


class DualEncoderModel(EncoderDecoderModel):
  """Trains an encoder so that the vectors of texts that belong together are close.

  Each input is compared with all targets of the batch (of a microbatch, with gradient accumulation), and each
  target with all inputs: the cross-entropy of the cosine similarities, divided by a temperature, in both
  directions (Ni et al. 2021, "Large Dual Encoders Are Generalizable Retrievers", section 3; T5X Retrieval's
  `DualEncoderModel`). Both texts go through the same encoder, and their vectors are means over tokens.
  The decoder, which gets no gradient, is kept so that the run converts to any format; it predicts nothing.
  """

  def __init__(
    self,
    module: nn.Module,
    input_vocabulary: Any,
    output_vocabulary: Any,
    optimizer_def: OptimizerDef | None,
    temperature: PositiveNumber = 0.01,
    adapter: Adapter | None = None,
  ):
    """Builds the model.

    Args:
      module: the network, as of `EncoderDecoderModel`.
      input_vocabulary: the SeqIO vocabulary of the inputs.
      output_vocabulary: the SeqIO vocabulary of the targets.
      optimizer_def: the optimizer.
      temperature: what the similarities are divided by.
      adapter: trains few parameters; see `BaseTransformerModel`.
    """
    network = (module, input_vocabulary, output_vocabulary, optimizer_def)
    super().__init__(*network, adapter=adapter)
    self._temperature = temperature

  def loss_fn(
    self, params: PyTree, batch: Batch, dropout_rng: Array | None, flax_mutables: PyTree = None
  ) -> tuple[Float[Array, ""], Any]:
    """Returns the sum of the pairs' losses, and the metrics, in which a pair is a token.

    `accuracy` is the share of inputs whose own target is the closest of the batch.

    Args:
      params: the parameters.
      batch: `encoder_input_tokens` [B, S] and `decoder_target_tokens` [B, T]; row n of both is a pair.
      dropout_rng: the random key for dropout; None disables dropout.
      flax_mutables: not supported.

    Raises:
      ValueError: several pairs are packed into a row.
    """
    if "encoder_segment_ids" in batch:
      raise ValueError(
        "DualEncoderModel needs one pair per row: set utils.DatasetConfig.pack = False"
      )
    sides = ("encoder_input_tokens", "decoder_target_tokens")
    rngs = jax.random.split(dropout_rng) if dropout_rng is not None else (None, None)
    a_BD, b_BD = (
      self.embed_batch(params, {"encoder_input_tokens": batch[name]}, dropout_rng=rng)
      for name, rng in zip(sides, rngs, strict=True)
    )
    # The vectors of texts without tokens are 0, where the gradient of an ordinary norm is NaN.
    a_BD, b_BD = (x / optax.safe_norm(x, 1e-6, axis=1, keepdims=True) for x in (a_BD, b_BD))
    # Rows of padding complete the last batch of an evaluation.
    real_B = jnp.any(batch["decoder_target_tokens"] != self.pad_id, axis=1).astype(jnp.float32)
    logits_BB = jnp.where(jnp.outer(real_B, real_B) > 0, a_BD @ b_BD.T / self._temperature, -1e9)
    own_B = jnp.arange(len(logits_BB))
    one_way, other_way = (
      losses.compute_weighted_cross_entropy(x, own_B, real_B)[0] for x in (logits_BB, logits_BB.T)
    )
    loss = (one_way + other_way) / 2
    segments = self._segment_ids(batch)
    return loss, compute_base_metrics(logits_BB, own_B, real_B, loss, segment_ids=segments)

  def predict_batch_with_aux(self, *args: Any, **kwargs: Any) -> Any:
    """Raises ValueError, because the decoder is not trained."""
    raise ValueError("a DualEncoderModel predicts and scores no text: use `rosetta-t5 embed`")

  score_batch = predict_batch_with_aux
