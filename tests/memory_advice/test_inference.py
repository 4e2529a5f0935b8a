"""Advice for predictions or scores that do not fit. Each change lowers the memory that XLA reports."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from tiny_models import GPT, T5_1_1, make_batch, make_decoder_only_model, make_model

from rosetta_t5.memory_advice import (
  InferenceMemoryAdvisor,
  OutOfMemoryError,
  explain_out_of_memory_in_evaluation,
)
from rosetta_t5.networks.t5 import Transformer
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.training import InferenceState

_WIDE = {"emb_dim": 64, "mlp_dim": 128, "head_dim": 16, "dtype": "bfloat16", "vocab_size": 1024}
CONFIGS = {
  "T5": dataclasses.replace(T5_1_1, **_WIDE),
  "GPT": GPT.replace(**_WIDE, max_length=256),
}
_LINE = re.compile(r"^  (\S+) = (.*?)   # (.*)saves about (\S+ [kMG]B)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Setting:
  """The settings of a run that predicts or scores, by the arguments' names in the advice."""

  family: str = "T5"
  scores: bool = False
  batch_size: int = 32
  inputs: int = 64
  targets: int = 32
  num_decodes: int = 1
  num_partitions: int = 1
  loss_chunk_length: int | None = None
  dtype: str = "float32"

  def model(self):
    config = CONFIGS[self.family]
    chunk = {"loss_chunk_length": self.loss_chunk_length}
    if self.family == "GPT":
      model = make_decoder_only_model(config, **chunk)
    else:
      model = make_model(Transformer(config), **chunk)
    # Gin binds arguments in the same way.
    model.predict_batch_with_aux = functools.partial(
      model.predict_batch_with_aux, num_decodes=self.num_decodes
    )
    return model

  def batch(self):
    if self.family == "T5":
      return make_batch(self.batch_size, self.inputs, self.targets)
    names = ("input_tokens", "target_tokens", "loss_weights", "causal_attention")
    shape = (self.batch_size, self.inputs + self.targets)
    return {f"decoder_{name}": jnp.ones(shape, jnp.int32) for name in names}

  def advisor(self):
    model, batch = self.model(), self.batch()
    partitioner = PjitPartitioner(num_partitions=self.num_partitions)
    shapes = {name: value.shape for name, value in batch.items()}
    state = jax.eval_shape(
      lambda key: InferenceState.create(model.get_initial_variables(key, shapes)),
      jax.random.PRNGKey(0),
    )
    initializer = types.SimpleNamespace(
      global_train_state_shape=state, train_state_axes=partitioner.get_mesh_axes(state)
    )
    return InferenceMemoryAdvisor(model, partitioner, initializer, shapes, self.scores, self.dtype)

  def error_text(self) -> str:
    """Returns the text of an out-of-memory error with advice."""
    with pytest.raises(OutOfMemoryError) as raised, self.advisor().explain_out_of_memory():
      jnp.zeros((1 << 46,), jnp.float32).block_until_ready()
    return str(raised.value)

  def bytes(self) -> int:
    """Returns the bytes that a device needs according to XLA."""
    advisor = self.advisor()
    method = advisor.model.score_batch if self.scores else advisor.model.predict_batch_with_aux
    axes = advisor.initializer.train_state_axes.params
    step = advisor.partitioner.partition(
      lambda params, batch: method(params, batch),
      (axes, advisor.partitioner.data_partition_spec),
      PartitionSpec(),
    )
    params = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, self.dtype),
      advisor.initializer.global_train_state_shape.params,
    )
    memory = step.lower(params, self.batch()).compile().memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes

  def with_line(self, name: str, value: str) -> Setting:
    name, value = name.rpartition(".")[2], ast.literal_eval(value)
    changes = value if name == "TASK_FEATURE_LENGTHS" else {name: value}
    return dataclasses.replace(self, **changes)


def changed_arguments(text: str) -> list[str]:
  return [name.rpartition(".")[2] for name, *_ in _LINE.findall(text)]


@pytest.mark.parametrize(
  ("setting", "expected"),
  [
    pytest.param(
      Setting(num_decodes=8, inputs=16, targets=128),
      ["batch_size", "num_decodes"],
      id="beams",
      marks=pytest.mark.slow,
    ),
    pytest.param(Setting(inputs=512), ["TASK_FEATURE_LENGTHS", "batch_size"], id="long inputs"),
    pytest.param(
      Setting(scores=True, inputs=8, targets=64),
      ["loss_chunk_length", "batch_size"],
      id="scores",
      marks=pytest.mark.slow,
    ),
    pytest.param(
      Setting(batch_size=8, inputs=2, targets=2),
      ["num_partitions"],
      id="parameters",
      marks=pytest.mark.slow,
    ),
    pytest.param(
      Setting("GPT", num_decodes=8),
      ["batch_size", "num_decodes"],
      id="GPT's samples",
      marks=pytest.mark.slow,
    ),
    pytest.param(
      Setting("GPT", scores=True), ["loss_chunk_length", "batch_size"], id="GPT's scores"
    ),
  ],
)
def test_each_proposed_change_lowers_the_memory_that_xla_reports(setting, expected):
  message = setting.error_text()
  assert message.startswith("a device is out of memory: RESOURCE_EXHAUSTED: ")
  assert set(expected) <= set(changed_arguments(message)), message
  before = setting.bytes()
  for name, value, *_ in _LINE.findall(message):
    assert setting.with_line(name, value).bytes() < before, (name, value)


def test_advice_for_an_evaluation_has_the_scope_of_its_dataset():
  advisor = Setting().advisor()
  spec = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in advisor.shapes.items()}
  feed, cfg = types.SimpleNamespace(element_spec=spec), types.SimpleNamespace(batch_size=64)
  parts = (advisor.model, advisor.partitioner, advisor.initializer, feed, cfg)
  with (
    pytest.raises(OutOfMemoryError) as raised,
    explain_out_of_memory_in_evaluation(*parts, True, "train_eval/"),
  ):
    jnp.zeros((1 << 46,), jnp.float32).block_until_ready()
  assert "  train_eval/utils.DatasetConfig.batch_size = 32   # saves about" in str(raised.value)


def test_parameters_that_do_not_fit_must_be_shared_by_more_devices():
  with (
    pytest.raises(OutOfMemoryError) as raised,
    Setting().advisor().explain_out_of_memory(is_restoring=True),
  ):
    jnp.zeros((1 << 46,), jnp.float32).block_until_ready()
  assert changed_arguments(str(raised.value)) == ["num_partitions"]
  assert "Estimated on each device: params 920 kB. What" in str(raised.value)


def test_a_model_with_other_inputs_gets_general_advice():
  with (
    pytest.raises(OutOfMemoryError, match=r"A smaller batch_size, shorter lengths or more devices"),
    dataclasses.replace(Setting().advisor(), shapes={"mine": (8, 4)}).explain_out_of_memory(),
  ):
    jnp.zeros((1 << 46,), jnp.float32).block_until_ready()
