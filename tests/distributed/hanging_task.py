"""A SeqIO task whose data stop arriving after a while, on process 1 only."""

from __future__ import annotations

import time

import jax
import seqio
import tensorflow as tf

EXAMPLES_BEFORE_THE_HANG = 600  # More than a run reads before its first step.


def read(split, shuffle_files=False, seed=None):
  def examples():
    for index in range(100_000):
      if index >= EXAMPLES_BEFORE_THE_HANG and jax.process_index() == 1:
        time.sleep(3600)
      yield f"example {index}"

  return tf.data.Dataset.from_generator(examples, output_signature=tf.TensorSpec((), tf.string))


seqio.TaskRegistry.add(
  "hangs",
  source=seqio.FunctionDataSource(read, splits=["train", "validation"]),
  preprocessors=[
    lambda dataset: dataset.map(lambda text: {"inputs": text, "targets": text}),
    seqio.preprocessors.tokenize,
    seqio.preprocessors.append_eos_after_trim,
  ],
  output_features={
    "inputs": seqio.Feature(seqio.ByteVocabulary(), required=False),
    "targets": seqio.Feature(seqio.ByteVocabulary()),
  },
)
