"""The module `prompts` of T5X's prompt tuning: the vectors and their initial values."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import numpy as np
from etils import epath

from rosetta_t5.argument_types import Positive
from rosetta_t5.checkpoints.checkpoint_folders import read_arrays, resolve_checkpoint
from rosetta_t5.networks.layers.dense import Initializer
from rosetta_t5.networks.layers.prompt import (
  from_array,
  from_embedded_list,
  from_embedded_string,
  from_sample_of_embeddings,
)


def np_load(path: epath.PathLike, restore_dtype: Any = None) -> np.ndarray:
  """Returns the array in a file of numpy."""
  with epath.Path(path).open("rb") as file:
    return np.asarray(np.load(file), restore_dtype)


def t5x_load(
  checkpoint_path: epath.PathLike, variable_path: str, restore_dtype: Any = None
) -> np.ndarray:
  """Returns a parameter of a checkpoint of any layout, such as token_embedder/embedding.

  Args:
    checkpoint_path: the checkpoint.
    variable_path: the parameter's name; `target/` before it is optional.
    restore_dtype: the type of the array; None for its own.
  """
  name = "target/" + re.sub(r"^(target)?/", "", variable_path)
  return np.asarray(read_arrays(resolve_checkpoint(checkpoint_path))[name].get(), restore_dtype)


@dataclasses.dataclass(kw_only=True)
class Prompt:
  """The settings of `NetworkConfig` that make a prompt of `length` vectors.

  `axis_names` must be those of the network's parameter.
  """

  length: Positive
  prompt_init: Initializer = dataclasses.field(default_factory=jax.nn.initializers.uniform)
  dtype: Any = "float32"
