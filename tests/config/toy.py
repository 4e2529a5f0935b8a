"""A toy run, which the gin files of these tests configure."""

from __future__ import annotations

import dataclasses
from typing import Any


def train(
  *, model: Any, model_dir: str, total_steps: int, dataset_cfg: Any = None
) -> dict[str, Any]:
  """Returns its arguments. It replaces a real run function."""
  return {
    "model": model,
    "model_dir": model_dir,
    "total_steps": total_steps,
    "dataset_cfg": dataset_cfg,
  }


@dataclasses.dataclass
class Model:
  """Has one required argument."""

  width: int
  optimizer: Any = None
  dropout_rate: float = 0.1

  def predict(self, num_decodes: int = 1) -> int:
    """Returns its argument."""
    return num_decodes


@dataclasses.dataclass
class DatasetConfig:
  """Its instances are built in several scopes."""

  batch_size: int = 128
  lengths: Any = None


class Schedule:
  """Its instances are called."""

  def __call__(self, step: int) -> int:
    """Returns its argument."""
    return step


class Optimizer:
  """The run receives it as a class, not as an instance."""
