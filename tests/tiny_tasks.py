"""SeqIO tasks of a few pairs of texts, as bytes, and a T5 that reads them."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from tiny_models import adafactor

from rosetta_t5 import checkpoints
from rosetta_t5.data.tensorflow_import import import_seqio, import_tensorflow
from rosetta_t5.models import EncoderDecoderModel
from rosetta_t5.networks.transformer import T5Config, Transformer
from rosetta_t5.parallel import PjitPartitioner

PAIRS = tuple((f"question {n * n}", f"answer {n}") for n in range(11))


def add_task(
  name: str, pairs: Sequence[tuple[str, str]] = PAIRS, metric_fns: Sequence[Any] = ()
) -> None:
  """Registers a task whose splits `train`, `validation` and `test` are these pairs."""
  tf, seqio = import_tensorflow(), import_seqio()
  inputs, targets = (tf.constant(side) for side in zip(*pairs, strict=True))

  def read(split: str, shuffle_files: bool = False, seed: int | None = None) -> Any:
    return tf.data.Dataset.from_tensor_slices({"inputs": inputs, "targets": targets})

  seqio.TaskRegistry.add(
    name,
    source=seqio.FunctionDataSource(read, splits=["train", "validation", "test"]),
    preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
    output_features={
      "inputs": seqio.Feature(byte_vocabulary()),
      "targets": seqio.Feature(byte_vocabulary()),
    },
    metric_fns=list(metric_fns),
  )


@functools.cache
def byte_vocabulary() -> Any:
  return import_seqio().ByteVocabulary()


def byte_model(**arguments: Any) -> EncoderDecoderModel:
  """Returns a T5 of a few thousand parameters for the byte vocabulary."""
  config = T5Config(
    vocab_size=384,
    emb_dim=16,
    num_heads=2,
    num_encoder_layers=1,
    num_decoder_layers=1,
    head_dim=8,
    mlp_dim=32,
    dropout_rate=0.0,
  )
  return EncoderDecoderModel(
    module=Transformer(config),
    input_vocabulary=byte_vocabulary(),
    output_vocabulary=byte_vocabulary(),
    optimizer_def=adafactor(),
    **arguments,
  )


def save_checkpoints(folder: pathlib.Path, steps: Sequence[int]) -> None:
  """Saves `byte_model()` and its optimizer state at these steps, each with different parameters."""
  model, partitioner = byte_model(), PjitPartitioner(num_partitions=1)
  shapes = {"encoder_input_tokens": (8, 16), "decoder_input_tokens": (8, 16)}
  initializer = checkpoints.TrainStateInitializer(
    model.optimizer_def, model.get_initial_variables, shapes, partitioner
  )
  manager = checkpoints.OrbaxCheckpointManagerInterface(
    folder, initializer.global_train_state_shape, partitioner
  )
  for step in steps:
    state = initializer.from_scratch(jax.random.PRNGKey(step))
    manager.save(state.replace_step(jax.device_put(np.int32(step), state.step.sharding)))
  manager.close()
