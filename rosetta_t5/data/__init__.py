"""Data: SeqIO's tasks and mixtures as batches on the devices. TensorFlow is imported on first use."""

from rosetta_t5.data.dataset_config import (
  DatasetConfig,
  find_task_or_mixture,
  import_module,
  resolve_seed,
)
from rosetta_t5.data.pipeline.data_description import check_examples, check_same_files
from rosetta_t5.data.pipeline.datasets import (
  get_dataset,
  get_dataset_inner,
  get_training_eval_datasets,
  token_limit,
)
from rosetta_t5.data.pipeline.feed import (
  ShardedDatasetIterator,
  get_zeros_batch_like_dataset,
  get_zeros_batch_like_spec,
  prepare_train_iter,
  training_feed,
)
from rosetta_t5.data.pipeline.inference_data import has_metrics
from rosetta_t5.data.prepared import prepared_task
from rosetta_t5.data.tasks.catalogue import known_task
from rosetta_t5.data.tasks.chat_task import chat_task
from rosetta_t5.data.tasks.file_task import file_task, mixture, task_on_rows
from rosetta_t5.data.vocabularies.task_vocabularies import (
  get_vocabulary,
  gpt2_vocabulary,
  round_vocab_size_to_multiple,
  tokenizer_vocabulary,
  verify_matching_vocabs,
  vocabulary_digests,
)
