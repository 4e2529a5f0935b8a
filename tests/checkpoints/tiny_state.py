"""A train state that is small enough to save quickly: two kernels sharded over the model axis."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen import partitioning as nn_partitioning

from rosetta_t5.checkpoints import OrbaxCheckpointManagerInterface, TrainStateInitializer
from rosetta_t5.checkpoints.arrays.state_dicts import flatten_state_dict
from rosetta_t5.checkpoints.formats import t5x_layouts
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.training.optimizers.adafactor import Adafactor
from rosetta_t5.training.optimizers.factor_rules import standard_logical_factor_rules
from rosetta_t5.training.optimizers.optimizer_def import OptimizerDef
from rosetta_t5.training.train_state import TrainState


class Tiny(nn.Module):
  """Two layers; `width` changes shapes and `out_name` a parameter's name."""

  width: int = 16
  out_name: str = "wo"

  @nn.compact
  def __call__(self, x_BD: jax.Array) -> jax.Array:
    wi = nn_partitioning.param_with_axes(
      "wi", nn.initializers.normal(), (8, self.width), jnp.float32, axes=("embed", "mlp")
    )
    wo = nn_partitioning.param_with_axes(
      self.out_name, nn.initializers.normal(), (self.width, 8), jnp.float32, axes=("mlp", "embed")
    )
    return x_BD @ wi @ wo


def adafactor() -> Adafactor:
  return Adafactor(logical_factor_rules=standard_logical_factor_rules())


@dataclasses.dataclass
class Setup:
  """The objects that a run needs to save and restore."""

  module: Tiny = dataclasses.field(default_factory=Tiny)
  num_partitions: int = 2
  optimizer: OptimizerDef = dataclasses.field(default_factory=adafactor)

  def __post_init__(self) -> None:
    self.partitioner = PjitPartitioner(num_partitions=self.num_partitions)
    self.initializer = TrainStateInitializer(
      self.optimizer, self.init_variables, {"x": (2, 8)}, self.partitioner
    )

  def init_variables(self, rng: jax.Array, input_shapes: Any, input_types: Any) -> Any:
    del input_types
    return self.module.init(rng, jnp.ones(input_shapes["x"]))

  def state(self, step: int = 0, seed: int = 0) -> TrainState:
    state = self.initializer.from_scratch(jax.random.PRNGKey(seed))
    return state.replace_step(jax.device_put(np.int32(step), state.step.sharding))

  def manager(self, directory: pathlib.Path, **kwargs: Any) -> OrbaxCheckpointManagerInterface:
    return OrbaxCheckpointManagerInterface(
      directory, self.initializer.global_train_state_shape, self.partitioner, **kwargs
    )


def write_older_layout(folder: pathlib.Path, state: TrainState) -> None:
  """Writes `folder/checkpoint_STEP` in T5X's older layout."""
  arrays = flatten_state_dict(state.state_dict())
  t5x_layouts.write_older(folder / f"checkpoint_{int(state.step)}", arrays)


class Counter:
  """A dataset iterator with T5X's `save` and `restore`."""

  def __init__(self) -> None:
    self.position = 0

  def __next__(self) -> int:
    self.position += 1
    return self.position

  def save(self, filename: str) -> None:
    pathlib.Path(filename).write_text(str(self.position))

  def restore(self, filename: str) -> None:
    self.position = int(pathlib.Path(filename).read_text())
