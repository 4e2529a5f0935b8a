"""SeqIO tasks on a file that every Python has: the source of `textwrap`, upper-cased."""

from __future__ import annotations

import textwrap

import seqio
import tensorflow as tf


def add(name, *preprocessors):
  seqio.TaskRegistry.add(
    name,
    source=seqio.TextLineDataSource(dict.fromkeys(["train", "validation"], textwrap.__file__)),
    preprocessors=[
      lambda dataset: dataset.map(lambda t: {"inputs": t, "targets": tf.strings.upper(t)}),
      *preprocessors,
      seqio.preprocessors.tokenize,
      seqio.preprocessors.append_eos_after_trim,
    ],
    output_features={
      "inputs": seqio.Feature(seqio.ByteVocabulary(), required=False),
      "targets": seqio.Feature(seqio.ByteVocabulary()),
    },
  )


add("run_upper_case")
add("run_without_examples", lambda dataset: dataset.filter(lambda example: False))
