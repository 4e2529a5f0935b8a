"""A task of the user's own: repeat what was said."""

import functools

import seqio
import tensorflow as tf

SAID = [f"word {n} of many" for n in range(64)]
FEATURES = {
  "inputs": seqio.Feature(seqio.ByteVocabulary()),
  "targets": seqio.Feature(seqio.ByteVocabulary()),
}


def _source(split, shuffle_files, seed=None):
  del split, shuffle_files, seed
  return tf.data.Dataset.from_tensor_slices({"inputs": SAID, "targets": SAID})


def share_right(targets, predictions):
  """The share of answers that are right."""
  return {"right": sum(t == p for t, p in zip(targets, predictions, strict=True)) / len(targets)}


if "wordlab_repeat" not in seqio.TaskRegistry.names():
  seqio.TaskRegistry.add(
    "wordlab_repeat",
    source=seqio.FunctionDataSource(_source, splits=["train", "validation"]),
    preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
    output_features=FEATURES,
    metric_fns=[share_right],
  )


def swap_case(dataset, places):
  """A runtime preprocessor: moves every id up."""
  return dataset.map(lambda row: {**row, "inputs": row["inputs"] + places})


def get_dataset(
  cfg,
  shard_id,
  num_shards,
  feature_converter_cls,
  num_epochs=None,
  continue_from_last_checkpoint=False,
):
  """The user's own way to make batches."""
  del continue_from_last_checkpoint
  dataset = seqio.get_mixture_or_task(cfg.mixture_or_task_name).get_dataset(
    sequence_length=cfg.task_feature_lengths,
    split=cfg.split,
    shuffle=cfg.shuffle,
    seed=cfg.seed,
    shard_info=seqio.ShardInfo(shard_id, num_shards),
    num_epochs=num_epochs,
  )
  for preprocess in cfg.runtime_preprocessors or ():
    dataset = preprocess(dataset)
  dataset = feature_converter_cls(pack=cfg.pack)(dataset, cfg.task_feature_lengths)
  return dataset.batch(cfg.batch_size // num_shards, drop_remainder=True)


up_by_one = functools.partial(swap_case, places=1)
