"""T5X's `test_utils`: fakes for the tests of programs written for T5X."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from rosetta_t5.checkpoints.arrays.lazy_arrays import LazyArray
from rosetta_t5.data.tensorflow_import import import_tensorflow
from rosetta_t5.models import EncoderDecoderModel
from rosetta_t5.networks.t5 import T5Config, Transformer
from rosetta_t5.training.optimizers.adafactor import Adafactor
from rosetta_t5.training.optimizers.factor_rules import standard_logical_factor_rules
from rosetta_t5.training.optimizers.optimizer_def import OptimizerDef
from t5x.train_state import FlaxOptimTrainState

if TYPE_CHECKING:
  import tensorflow as tf

_TRAIN = [("copy: day", "day"), ("copy: night", "night"), ("copy: dawn", "dawn")]
# Each example appears four times, so that tests see whether predictions depend on the position.
_VALIDATION = [("copy: sun", "sun")] * 4 + [("copy: moon", "moon")] * 4


@dataclasses.dataclass(frozen=True)
class CpuDevice:
  """A device of the CPU with an id, for functions that arrange devices."""

  id: int
  process_index: int
  device_kind: str = "cpu"
  platform: str = "cpu"


@dataclasses.dataclass(frozen=True)
class TpuDevice:
  """A TPU core with its position (x, y, z) in the grid of chips."""

  id: int
  process_index: int
  coords: tuple[int, ...]
  core_on_chip: int
  device_kind: str = "TPU v3"
  platform: str = "tpu"


def make_devices(
  nx: int,
  ny: int,
  nz: int,
  nc: int = 2,
  host_layout: tuple[int, ...] = (2, 2, 1, 2),
  kind: str = "TPU v3",
) -> list[TpuDevice]:
  """Returns the cores of nx·ny·nz chips with nc cores; a host has `host_layout` of them."""
  sizes = np.array([nx, ny, nz, nc])

  def number(position: np.ndarray, sizes: np.ndarray) -> int:
    # The core changes fastest, then x, y and z.
    return int(np.ravel_multi_index(position[[2, 1, 0, 3]], sizes[[2, 1, 0, 3]]))

  devices = []
  for position in itertools.product(*map(range, sizes)):
    host = number(np.array(position) // host_layout, sizes // host_layout)
    core = number(np.array(position), sizes)
    devices.append(TpuDevice(core, host, position[:3], position[3], kind))
  return devices


@dataclasses.dataclass
class FakeVocabulary:
  """What a model needs of a vocabulary."""

  vocab_size: int = 128
  eos_id: int = 1


def get_fake_vocab() -> tuple[FakeVocabulary, FakeVocabulary]:
  """Returns the vocabularies of inputs and targets of `get_fake_tokenized_dataset`."""
  return FakeVocabulary(), FakeVocabulary()


def get_fake_tokenized_dataset(*_: Any, split: str = "validation", **__: Any) -> tf.data.Dataset:
  """Returns examples with token ids below 32: `train` without end, or eight of `validation`.

  The other arguments are those of `seqio.Task.get_dataset`, which it replaces in tests.
  """
  tf = import_tensorflow()
  rows = _TRAIN if split == "train" else _VALIDATION
  columns: dict[str, Any] = {}
  for name, texts in zip(("inputs", "targets"), zip(*rows, strict=True), strict=True):
    columns[name] = tf.ragged.constant(
      [[3 + ord(c) % 29 for c in text] for text in texts], tf.int32
    )
    columns[f"{name}_pretokenized"] = list(texts)
  dataset = tf.data.Dataset.from_tensor_slices(columns)
  dataset = dataset.map(lambda row: {n: tf.convert_to_tensor(row[n]) for n in columns})
  return dataset.repeat() if split == "train" else dataset


def get_t5_test_model(**config_overrides: Any) -> EncoderDecoderModel:
  """Returns a tiny T5 1.1 whose vocabulary has no texts."""
  config = T5Config(
    **{
      "vocab_size": 32128,
      "dtype": "bfloat16",
      "emb_dim": 8,
      "num_heads": 4,
      "num_encoder_layers": 2,
      "num_decoder_layers": 2,
      "head_dim": 3,
      "mlp_dim": 16,
      "mlp_activations": ("gelu", "linear"),
      "dropout_rate": 0.0,
      "logits_via_embedding": False,
      **config_overrides,
    }
  )
  vocabulary: Any = FakeVocabulary(config.vocab_size)
  optimizer = Adafactor(decay_rate=0.8, logical_factor_rules=standard_logical_factor_rules())
  return EncoderDecoderModel(Transformer(config), vocabulary, vocabulary, optimizer)


def get_train_state_from_variables(
  variables: Mapping[str, Any], optimizer_def: OptimizerDef | None = None
) -> FlaxOptimTrainState:
  """Returns a train state of step 0; the optimizer is Adafactor by default."""
  return FlaxOptimTrainState((optimizer_def or Adafactor(0.0)).create(variables["params"]))


def assert_equal(a: Any, b: Any) -> None:
  """Fails unless two arrays, which may be lazy, have the same type and values."""
  assert isinstance(a, type(b)), f"expected a {type(b).__name__}, got a {type(a).__name__}"
  a, b = (x.get() if isinstance(x, LazyArray) else x for x in (a, b))
  np.testing.assert_array_equal(a, b)


def assert_same(tree_a: Any, tree_b: Any) -> None:
  """Fails unless two trees have the same arrays."""
  jax.tree.map(assert_equal, *jax.device_get((tree_a, tree_b)))
