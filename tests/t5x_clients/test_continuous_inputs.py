"""A program like MT3's: spectrogram frames instead of input tokens, its own network, beam search."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from client_run import train_two_steps

import t5x
from rosetta_t5.data.tensorflow_import import import_seqio, import_tensorflow
from t5x.examples.t5 import layers

seqio, tf = import_seqio(), import_tensorflow()

LENGTHS = {"inputs": 6, "targets": 5}
BATCH, DEPTH, WIDTH = 8, 4, 8


class FrameFeatureConverter(seqio.FeatureConverter):
  """Passes frames on as the encoder's input; nothing is packed."""

  TASK_FEATURES = {  # noqa: RUF012
    "inputs": seqio.FeatureConverter.FeatureSpec(dtype=tf.float32, rank=2),
    "targets": seqio.FeatureConverter.FeatureSpec(dtype=tf.int32),
  }
  MODEL_FEATURES = {  # noqa: RUF012
    "encoder_input_tokens": seqio.FeatureConverter.FeatureSpec(dtype=tf.float32, rank=2),
    **dict.fromkeys(
      ("decoder_target_tokens", "decoder_input_tokens", "decoder_loss_weights"),
      seqio.FeatureConverter.FeatureSpec(dtype=tf.int32),
    ),
  }

  def _convert_features(self, ds, task_feature_lengths):
    def convert(features):
      return {
        "encoder_input_tokens": features["inputs"],
        "decoder_target_tokens": features["targets"],
        "decoder_input_tokens": seqio.autoregressive_inputs(features["targets"]),
        "decoder_loss_weights": seqio.non_padding_position(features["targets"]),
      }

    return self._pack_or_pad(ds, task_feature_lengths).map(convert)

  def get_model_feature_lengths(self, task_feature_lengths):
    targets = ("decoder_target_tokens", "decoder_input_tokens", "decoder_loss_weights")
    lengths = dict.fromkeys(targets, task_feature_lengths["targets"])
    return {"encoder_input_tokens": task_feature_lengths["inputs"], **lengths}


class Positions(nn.Module):
  """Adds a fixed vector to each position, and counts the positions of decoding in the cache."""

  @nn.compact
  def __call__(self, x_BTD, decode=False):
    table = jnp.sin(jnp.arange(16.0)[:, None] * jnp.arange(1.0, 1 + WIDTH)[None])
    if not decode:
      return x_BTD + table[None, : x_BTD.shape[1]]
    is_step = self.has_variable("cache", "position_embedder_index")
    index = self.variable("cache", "position_embedder_index", lambda: jnp.int32(-1))
    if is_step:
      index.value = index.value + 1
    return x_BTD + jax.lax.dynamic_slice(table, (index.value, 0), (1, WIDTH))[None]


class Network(nn.Module):
  """One attention layer on each side, made of T5X's layers."""

  def setup(self):
    attention = functools.partial(layers.MultiHeadDotProductAttention, num_heads=2, head_dim=4)
    kernel_axes = ("vocab", "embed")
    self.project = layers.DenseGeneral(WIDTH, kernel_axes=kernel_axes, name="frames_projection")
    self.positions, self.target_positions = Positions(), Positions()
    self.encoder_attention = attention(name="encoder_attention")
    self.embedder = layers.Embed(num_embeddings=384, features=WIDTH, name="token_embedder")
    self.self_attention = attention(name="self_attention")
    self.cross_attention = attention(name="cross_attention")
    self.norm = layers.LayerNorm(name="decoder_norm")
    self.logits = layers.DenseGeneral(384, kernel_axes=("embed", "vocab"), name="logits_dense")

  def encode(self, encoder_input_tokens, encoder_segment_ids=None, enable_dropout=True):
    assert encoder_input_tokens.ndim == 3
    x = self.positions(self.project(encoder_input_tokens.astype("float32")))
    return x + self.encoder_attention(x, x, deterministic=not enable_dropout)

  def decode(
    self,
    encoded,
    encoder_input_tokens,
    decoder_input_tokens,
    decoder_target_tokens,
    encoder_segment_ids=None,
    decoder_segment_ids=None,
    decoder_positions=None,
    enable_dropout=True,
    decode=False,
    max_decode_length=None,
  ):
    mask = None if decode else layers.make_decoder_mask(decoder_target_tokens, dtype=jnp.float32)
    y = self.target_positions(self.embedder(decoder_input_tokens.astype("int32")), decode=decode)
    options = {"deterministic": not enable_dropout}
    y = y + self.self_attention(y, y, mask, decode=decode, **options)
    y = y + self.cross_attention(y, encoded, **options)
    return self.logits(self.norm(y))

  def __call__(
    self,
    encoder_input_tokens,
    decoder_input_tokens,
    decoder_target_tokens,
    encoder_segment_ids=None,
    decoder_segment_ids=None,
    encoder_positions=None,
    decoder_positions=None,
    *,
    enable_dropout=True,
    decode=False,
  ):
    encoded = self.encode(encoder_input_tokens, enable_dropout=enable_dropout)
    tokens = (encoder_input_tokens, decoder_input_tokens, decoder_target_tokens)
    return self.decode(encoded, *tokens, enable_dropout=enable_dropout, decode=decode)


class FrameModel(t5x.models.EncoderDecoderModel):
  """Evaluation and inference give the shape of the inputs without their depth."""

  FEATURE_CONVERTER_CLS = FrameFeatureConverter

  def __init__(self, module, vocabulary, optimizer_def, input_depth):
    super().__init__(module, vocabulary, vocabulary, optimizer_def, t5x.decoding.beam_search)
    self._input_depth = input_depth

  def get_initial_variables(self, rng, input_shapes, input_types=None):
    shape = input_shapes["encoder_input_tokens"]
    if len(shape) == 2:
      input_shapes = {**input_shapes, "encoder_input_tokens": (*shape, self._input_depth)}
    return super().get_initial_variables(rng, input_shapes, input_types)


class InferenceModel:
  """Restores a checkpoint and predicts tokens of batches, as MT3's notebook does."""

  def __init__(self, checkpoint_path):
    self.vocabulary = seqio.ByteVocabulary()
    self.partitioner = t5x.partitioning.PjitPartitioner(num_partitions=1)
    optimizer = t5x.adafactor.Adafactor(decay_rate=0.8, step_offset=0)
    self.model = FrameModel(Network(), self.vocabulary, optimizer, input_depth=DEPTH)
    self.initializer = t5x.utils.TrainStateInitializer(
      optimizer_def=self.model.optimizer_def,
      init_fn=self.model.get_initial_variables,
      input_shapes={
        "encoder_input_tokens": (BATCH, LENGTHS["inputs"]),
        "decoder_input_tokens": (BATCH, LENGTHS["targets"]),
      },
      partitioner=self.partitioner,
    )
    restore = t5x.utils.RestoreCheckpointConfig(
      path=checkpoint_path, mode="specific", dtype="float32"
    )
    configs = [restore] if checkpoint_path else []
    self.train_state = self.initializer.from_checkpoint_or_scratch(
      configs, init_rng=jax.random.PRNGKey(0)
    )
    self.predict = self._get_predict_fn(self.initializer.train_state_axes)

  @functools.lru_cache  # noqa: B019 - as in the notebook: the axes must be hashable
  def _get_predict_fn(self, train_state_axes):
    def predict(params, batch, decode_rng):
      return self.model.predict_batch_with_aux(params, batch, decoder_params={"decode_rng": None})

    data = t5x.partitioning.PartitionSpec("data")
    return self.partitioner.partition(
      predict,
      in_axis_resources=(train_state_axes.params, data, None),
      out_axis_resources=data,
    )

  def predict_texts(self, batch):
    tokens, _ = self.predict(self.train_state.params, batch, jax.random.PRNGKey(0))
    return self.vocabulary.decode_tf(tokens).numpy()


@pytest.mark.slow
def test_frames_are_trained_on_restored_and_transcribed(tmp_path):
  program = InferenceModel(checkpoint_path=None)
  rng = np.random.default_rng(0)
  examples = tf.data.Dataset.from_tensor_slices(
    {
      "inputs": rng.normal(size=(BATCH, LENGTHS["inputs"], DEPTH)).astype(np.float32),
      "targets": rng.integers(3, 200, size=(BATCH, LENGTHS["targets"]), dtype=np.int32),
    }
  )
  converter = program.model.FEATURE_CONVERTER_CLS(pack=False)
  batches = converter(examples, task_feature_lengths=LENGTHS).batch(BATCH).repeat()
  batch = next(batches.as_numpy_iterator())
  assert batch["encoder_input_tokens"].shape == (BATCH, LENGTHS["inputs"], DEPTH)
  trained, _ = train_two_steps(
    program.model,
    program.train_state,
    program.partitioner,
    program.initializer.train_state_axes,
    batches.as_numpy_iterator(),
  )
  t5x.checkpoints.Checkpointer(trained, program.partitioner, str(tmp_path)).save(trained)
  restored = InferenceModel(str(tmp_path / "checkpoint_2"))
  assert int(restored.train_state.step) == 2
  jax.tree.map(np.testing.assert_array_equal, restored.train_state.params, trained.params)
  assert restored.predict_texts(batch).shape == (BATCH,)
