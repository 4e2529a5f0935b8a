"""Which value a metric had at each checkpoint, read from TensorBoard's files in the same folder."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import struct
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from rosetta_t5.checkpoints.formats import protobuf

_LENGTH = struct.Struct("<Q")
_CHECKSUM = 4
# Field numbers of tensorflow.Event, Summary.Value and TensorProto.
_STEP, _SUMMARY = 2, 5
_TAG, _SIMPLE_VALUE, _TENSOR = 1, 2, 8
_DTYPE, _CONTENT, _FLOATS, _DOUBLES = 1, 4, 5, 6
_FLOAT, _DOUBLE = 1, 2


@dataclasses.dataclass(frozen=True)
class BestMetric:
  """The metric by which checkpoints are kept (T5X's arguments of SaveBestCheckpointer).

  Attributes:
    name: RUN/TAG, such as 'train/accuracy' or 'inference_eval/glue_cola_v002/eval/accuracy'.
    mode: 'max' or 'min', which values are better.
    keep_without: whether checkpoints whose metric is not known stay.
  """

  name: str
  mode: str = "max"
  keep_without: bool = True

  def __post_init__(self) -> None:
    if self.mode not in ("max", "min"):
      raise ValueError(f"metric_mode = {self.mode!r} is none of 'max', 'min'")
    if "/" not in self.name:
      raise ValueError(
        f"metric_name_to_monitor = {self.name!r} has to be RUN/TAG, the folder of TensorBoard's files "
        "under MODEL_DIR and the name in it: such as 'train/accuracy' or "
        "'training_eval/TASK/loss_per_nonpadding_target_token'"
      )

  def steps_to_delete(
    self, directory: str | os.PathLike[str], steps: Sequence[int], keep: int
  ) -> set[int]:
    """Returns the steps that may go: all but the latest and the `keep` best.

    Args:
      directory: the folder of checkpoints, which holds TensorBoard's files too.
      steps: of complete checkpoints, in ascending order.
      keep: how many of the best stay beside the latest.
    """
    older = list(steps[:-1])
    if len(older) <= keep:
      return set()
    values = populate_metrics_for_steps(directory, self.name, older)
    if self.keep_without:
      older = [step for step in older if step in values]
    sign = 1 if self.mode == "max" else -1
    # Unknown and NaN count as worst; of equals the older goes first.
    ranked = sorted(older, key=lambda step: _rank(values.get(step, math.nan) * sign))
    return set(ranked[: max(0, len(ranked) - keep)])


def _rank(value: float) -> float:
  return -math.inf if math.isnan(value) else value


def populate_metrics_for_steps(
  checkpoints_dir: str | os.PathLike[str], metric_name: str, steps: Iterable[int]
) -> dict[int, float]:
  """Returns {step: value} of a metric, for those of `steps` at which it was written (T5X's function).

  Args:
    checkpoints_dir: the folder that holds TensorBoard's folders.
    metric_name: RUN/TAG; RUN may have several levels.
    steps: the steps of interest.
  """
  wanted = set(steps)
  parts = metric_name.split("/")
  for levels in range(len(parts) - 1, 0, -1):
    run = pathlib.Path(os.fspath(checkpoints_dir), *parts[:levels])
    files = sorted(run.glob("*tfevents*"))
    tag = "/".join(parts[levels:])
    values = {
      step: value
      for file in files
      for step, name, value in _scalars(file)
      if step in wanted and name == tag
    }
    if values:
      return values
  return {}


def _scalars(file: pathlib.Path) -> Iterator[tuple[int, str, float]]:
  """Yields (step, tag, value) of a file of TensorBoard's."""
  for record in _records(file.read_bytes()):
    event = list(protobuf.fields(record))
    step = dict(event).get(_STEP, 0)
    for number, summary in event:
      if number != _SUMMARY:
        continue
      for _, entry in protobuf.fields(summary):
        fields = dict(protobuf.fields(entry))
        value = _value(fields)
        if value is not None:
          yield step, fields[_TAG].decode(), value


def _records(data: bytes) -> Iterator[bytes]:
  """Yields a TFRecord file's records; the last may still be being written."""
  place = 0
  while place + _LENGTH.size + _CHECKSUM <= len(data):
    (length,) = _LENGTH.unpack_from(data, place)
    start = place + _LENGTH.size + _CHECKSUM
    if start + length > len(data):
      return
    yield data[start : start + length]
    place = start + length + _CHECKSUM


def _value(fields: dict[int, bytes]) -> float | None:
  if _SIMPLE_VALUE in fields:
    return float(struct.unpack("<f", fields[_SIMPLE_VALUE])[0])
  tensor = dict(protobuf.fields(fields.get(_TENSOR, b"")))
  dtype = {_FLOAT: np.float32, _DOUBLE: np.float64}.get(tensor.get(_DTYPE, 0))
  content = tensor.get(_CONTENT) or tensor.get(_FLOATS if dtype is np.float32 else _DOUBLES)
  if dtype is None or not content or len(content) != np.dtype(dtype).itemsize:
    return None
  return float(np.frombuffer(content, dtype)[0])
