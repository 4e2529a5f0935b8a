"""Data: tasks and mixtures of SeqIO as batches on the devices. TensorFlow is imported on first use."""

from rosetta_t5.data.catalogue import known_task
from rosetta_t5.data.dataset_config import DatasetConfig, import_module, resolve_seed
from rosetta_t5.data.datasets import get_dataset, get_dataset_inner, get_training_eval_datasets
from rosetta_t5.data.feed import (
  ShardedDatasetIterator,
  get_zeros_batch_like_dataset,
  get_zeros_batch_like_spec,
  prepare_train_iter,
)
from rosetta_t5.data.gpt2_vocabulary import gpt2_vocabulary
from rosetta_t5.data.own_files import file_task
from rosetta_t5.data.prepared import prepared_task
from rosetta_t5.data.tensorflow_import import start_importing
from rosetta_t5.data.vocabulary import (
  get_vocabulary,
  round_vocab_size_to_multiple,
  verify_matching_vocabs,
)

__all__ = [
  "DatasetConfig",
  "ShardedDatasetIterator",
  "file_task",
  "get_dataset",
  "get_dataset_inner",
  "get_training_eval_datasets",
  "get_vocabulary",
  "get_zeros_batch_like_dataset",
  "get_zeros_batch_like_spec",
  "gpt2_vocabulary",
  "import_module",
  "known_task",
  "prepare_train_iter",
  "prepared_task",
  "resolve_seed",
  "round_vocab_size_to_multiple",
  "start_importing",
  "verify_matching_vocabs",
]
