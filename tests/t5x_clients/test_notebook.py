"""T5X's notebooks: a model trained step by step, first by hand and then by `InteractiveModel`."""

from __future__ import annotations

import functools

import clu.data
import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

import t5x
from rosetta_t5.data.tensorflow_import import import_seqio
from t5x import partitioning, utils
from t5x.examples.t5 import network
from t5x.infer import _extract_tokens_and_aux_values
from t5x.interactive_model import InteractiveModel, get_dataset_from_natural_text_examples

seqio = import_seqio()
BATCH = 8
LENGTHS = {"inputs": 8, "targets": 6}
# Notebooks give shapes as arrays.
SHAPES = {
  "encoder_input_tokens": np.array([BATCH, 8]),
  "decoder_target_tokens": np.array([BATCH, 6]),
  "decoder_input_tokens": np.array([BATCH, 6]),
  "decoder_loss_weights": np.array([BATCH, 6]),
}
EXAMPLES = [{"input": f"how {n}".encode(), "target": f"so {n}".encode()} for n in range(BATCH)]
PREPROCESSORS = [seqio.preprocessors.tokenize, seqio.preprocessors.append_eos]


def make_model():
  config = network.T5Config(
    vocab_size=384,
    dtype="bfloat16",
    emb_dim=8,
    num_heads=4,
    num_encoder_layers=1,
    num_decoder_layers=1,
    head_dim=3,
    mlp_dim=16,
    mlp_activations=("gelu", "linear"),
    dropout_rate=0.0,
    logits_via_embedding=False,
  )
  return t5x.models.EncoderDecoderModel(
    module=network.Transformer(config=config),
    input_vocabulary=seqio.ByteVocabulary(),
    output_vocabulary=seqio.ByteVocabulary(),
    optimizer_def=t5x.adafactor.Adafactor(decay_rate=0.8, step_offset=0),
    decode_fn=functools.partial(t5x.decoding.temperature_sample, temperature=1.0, topk=40),
  )


@pytest.mark.slow
def test_a_notebook_trains_saves_restores_and_predicts(tmp_path):
  model, folder = make_model(), str(tmp_path)
  partitioner = partitioning.PjitPartitioner(num_partitions=2)
  assert (partitioner._num_partitions, partitioner._model_parallel_submesh) == (2, None)
  seed = multihost_utils.broadcast_one_to_all(np.int32(42))
  init_rng, trainer_rng = jax.random.split(jax.random.PRNGKey(seed))
  initializer = utils.TrainStateInitializer(
    optimizer_def=model.optimizer_def,
    init_fn=model.get_initial_variables,
    input_shapes=SHAPES,
    input_types=None,
    partitioner=partitioner,
  )
  save_cfg = utils.SaveCheckpointConfig(dtype="float32", keep=5, save_dataset=False)
  restore_cfg = utils.RestoreCheckpointConfig(
    dtype="float32", mode="specific", path=f"{folder}/checkpoint_2"
  )
  manager = utils.LegacyCheckpointManager(
    save_cfg=save_cfg,
    restore_cfg=restore_cfg,
    train_state_shape=initializer.global_train_state_shape,
    partitioner=partitioner,
    ds_iter=None,
    model_dir=folder,
  )
  state = initializer.from_scratch(init_rng)
  utils.log_model_info(f"{folder}/info.txt", initializer.global_train_state_shape, partitioner)
  trainer = t5x.trainer.Trainer(
    model=model,
    train_state=state,
    partitioner=partitioner,
    eval_names=[],
    summary_dir=folder,
    train_state_axes=initializer.train_state_axes,
    rng=trainer_rng,
    learning_rate_fn=utils.create_learning_rate_scheduler(),
    num_microbatches=None,
  )
  features = {
    "inputs": seqio.Feature(vocabulary=model.input_vocabulary, add_eos=True),
    "targets": seqio.Feature(vocabulary=model.output_vocabulary, add_eos=True),
  }
  examples = get_dataset_from_natural_text_examples(
    examples=EXAMPLES,
    preprocessors=PREPROCESSORS,
    task_feature_lengths=LENGTHS,
    features=features,
  )
  converted = model.FEATURE_CONVERTER_CLS(pack=False)(examples, task_feature_lengths=LENGTHS)
  batches = converted.padded_batch(BATCH, drop_remainder=True)
  for _ in range(2):
    iterator = clu.data.dataset_iterator.TfDatasetIterator(batches, checkpoint=False)
    first_step = int(utils.get_local_data(trainer.train_state.step))
    summary = trainer.train(iterator, 1, start_step=first_step)
    assert summary.result()["loss"].value > 0
  trainer.close()
  manager.save(trainer.train_state, save_cfg.state_transformation_fns)
  restored = manager.restore(
    [restore_cfg.path],
    restore_cfg,
    utils.get_fallback_state(restore_cfg, lambda rng: initializer.from_scratch(rng), init_rng),
  )
  assert int(restored.step) == 2
  infer = utils.get_infer_fn(
    infer_step=model.score_batch,
    batch_size=BATCH,
    train_state_axes=initializer.train_state_axes,
    partitioner=partitioner,
  )
  scores, _ = _extract_tokens_and_aux_values(infer(converted.enumerate(), restored, rng=None))
  assert len(scores) == BATCH
  interactive = InteractiveModel(
    batch_size=BATCH,
    task_feature_lengths=LENGTHS,
    output_dir=f"{folder}//interactive",
    partitioner=partitioner,
    model=model,
    dtype="float32",
    restore_mode="specific",
    checkpoint_path=restore_cfg.path,
    input_shapes=SHAPES,
  )
  assert interactive.step == 2
  assert interactive._task_feature_lengths == LENGTHS


def test_results_of_inference_are_put_in_the_order_of_their_examples():
  aux = {"scores": np.array([0.2, 0.1]), "steps": [2, 1]}
  tokens, ordered = _extract_tokens_and_aux_values(([(1, "b"), (0, "a")], aux))
  assert (tokens, ordered) == (["a", "b"], {"scores": [0.1, 0.2], "steps": [1, 2]})
