"""A SeqIO task of text that every Python has: the source of `textwrap`, upper-cased."""

from __future__ import annotations

import inspect
import textwrap

import seqio
import tensorflow as tf

LINES = [line.strip() for line in inspect.getsource(textwrap).splitlines() if len(line) > 30]


def read(split, shuffle_files=False, seed=None):
  return tf.data.Dataset.from_tensor_slices(tf.constant(LINES, tf.string))


seqio.TaskRegistry.add(
  "resume_upper_case",
  source=seqio.FunctionDataSource(read, splits=["train", "validation"]),
  preprocessors=[
    lambda dataset: dataset.map(lambda t: {"inputs": t, "targets": tf.strings.upper(t)}),
    seqio.preprocessors.tokenize,
    seqio.preprocessors.append_eos_after_trim,
  ],
  output_features={
    "inputs": seqio.Feature(seqio.ByteVocabulary(), required=False),
    "targets": seqio.Feature(seqio.ByteVocabulary()),
  },
)
