"""A program like t5x_retrieval's: two texts are encoded, and each must be nearest to its partner."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from client_run import train_two_steps
from flax.linen.partitioning import param_with_axes

from t5x import adafactor, checkpoints, losses, metrics, models, partitioning, utils
from t5x.examples.t5 import layers, network

BATCH, LENGTH, WIDTH = 8, 6, 8
CONFIG = network.T5Config(
  vocab_size=32, emb_dim=WIDTH, num_heads=2, num_encoder_layers=1, head_dim=4, mlp_dim=16
)


class DualEncoder(nn.Module):
  """T5's encoder for both texts, and a projection with a logical axis that T5X does not have."""

  def setup(self):
    embedder = layers.Embed(num_embeddings=32, features=WIDTH, name="token_embedder")
    self.encoder = network.Encoder(config=CONFIG, shared_embedding=embedder)

  @nn.compact
  def encode(self, tokens, enable_dropout=True):
    encoded = self.encoder(tokens, deterministic=not enable_dropout)
    kernel = param_with_axes(
      "affinity", nn.initializers.normal(0.1), (WIDTH, 4), axes=("embed", "affinity")
    )
    mean = jnp.mean(encoded, axis=1) @ kernel
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)

  def __call__(self, left_tokens, right_tokens, enable_dropout=True):
    encodings = self.encode(jnp.concatenate([left_tokens, right_tokens]), enable_dropout)
    left, right = jnp.split(encodings, 2)
    return left, right, left @ right.T


class DualEncoderModel(models.BaseTransformerModel):
  """The loss in both directions; `score_batch` returns encodings or similarities."""

  FEATURE_CONVERTER_CLS = object

  def __init__(self, module, optimizer_def, inference_mode="encode"):
    self._inference_mode = inference_mode
    super().__init__(
      module=module, input_vocabulary=None, output_vocabulary=None, optimizer_def=optimizer_def
    )

  def get_initial_variables(self, rng, input_shapes, input_types=None):
    sides = ("left_encoder_input_tokens", "right_encoder_input_tokens")
    tokens = [jnp.ones(input_shapes[side], jnp.int32) for side in sides]
    return self.module.init(rng, *tokens, enable_dropout=False)

  def _compute_logits(self, params, batch, dropout_rng=None):
    (left, right, logits), _ = self.module.apply(
      {"params": params},
      batch["left_encoder_input_tokens"],
      batch["right_encoder_input_tokens"],
      enable_dropout=dropout_rng is not None,
      rngs=None if dropout_rng is None else {"dropout": dropout_rng},
      mutable="dropout",
    )
    return left, right, 100 * logits

  def _compute_metrics(self, params, batch, logits, loss, total_z_loss, align_loss):
    base = models.compute_base_metrics(
      logits=logits, targets=jnp.arange(BATCH), mask=None, loss=loss, z_loss=total_z_loss
    )
    return base | {"align_loss": metrics.AveragePerStep.from_model_output(align_loss)}

  def loss_fn(self, params, batch, dropout_rng):
    left, right, logits = self._compute_logits(params, batch, dropout_rng)
    one_hot = jnp.eye(BATCH)
    both = [losses.cross_entropy_with_logits(x, one_hot, z_loss=0.0)[0] for x in (logits, logits.T)]
    loss = jnp.mean(both[0] + both[1])
    align_loss = jnp.mean(jnp.linalg.norm(left - right, axis=1))
    return loss, self._compute_metrics(params, batch, logits, loss, 0.0, align_loss)

  def predict_batch_with_aux(self, params, batch, rng=None):
    raise NotImplementedError("A dual encoder does not decode.")

  def score_batch(self, params, batch, return_intermediates=False):
    tokens = batch["left_encoder_input_tokens"]
    if self._inference_mode == "encode":
      encode = self.module.encode
      return self.module.apply({"params": params}, tokens, enable_dropout=False, method=encode)
    return self._compute_logits(params, batch)[2]


@pytest.mark.slow
def test_a_dual_encoder_is_trained_restored_and_encodes(tmp_path):
  optimizer = adafactor.Adafactor(
    decay_rate=0.8,
    logical_factor_rules={
      **adafactor.standard_logical_factor_rules(),
      "affinity": adafactor.FactorDim.NONE,
    },
  )
  model = DualEncoderModel(DualEncoder(), optimizer)
  rules = (*partitioning.standard_logical_axis_rules(), ("affinity", None))
  partitioner = partitioning.PjitPartitioner(num_partitions=2, logical_axis_rules=rules)
  sides = ("left_encoder_input_tokens", "right_encoder_input_tokens")
  initializer = utils.TrainStateInitializer(
    optimizer_def=optimizer,
    init_fn=model.get_initial_variables,
    input_shapes=dict.fromkeys(sides, (BATCH, LENGTH)),
    partitioner=partitioner,
  )
  axes = initializer.train_state_axes
  assert axes.params["affinity"] == partitioning.PartitionSpec(None, None)
  tokens = np.random.default_rng(0).integers(1, 32, size=(2, BATCH, LENGTH), dtype=np.int32)
  batch = dict(zip(sides, tokens, strict=True))
  state = initializer.from_scratch(jax.random.PRNGKey(0))
  trained, values = train_two_steps(model, state, partitioner, axes, [batch] * 2)
  assert values["align_loss"].value > 0
  assert values["z_loss"].value == 0
  checkpoints.Checkpointer(trained, partitioner, str(tmp_path)).save(trained)
  restored = initializer.from_checkpoint(
    [utils.RestoreCheckpointConfig(path=str(tmp_path), mode="latest")]
  )
  assert int(restored.step) == 2
  encode = utils.get_infer_fn(
    infer_step=model.score_batch,
    batch_size=BATCH,
    train_state_axes=axes,
    partitioner=partitioner,
  )
  rows = [{side: batch[side][row] for side in sides} for row in range(5)]
  encodings = encode(list(enumerate(rows)), restored, rng=None)
  assert [row for row, _ in encodings] == list(range(5))
  np.testing.assert_allclose(np.linalg.norm([row for _, row in encodings], axis=1), 1, rtol=1e-4)
  jax.tree.map(np.testing.assert_array_equal, restored.params, trained.params)
  with pytest.raises(NotImplementedError):
    model.predict_batch({}, {})
