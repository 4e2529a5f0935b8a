"""Reads the numbers in TensorBoard's event files, without TensorFlow."""

import collections
import struct
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from jaxtyping import Float, Int

_HEADER, _FOOTER = 12, 4  # bytes of a record before its event, and after it
_FLOAT32, _DT_FLOAT = struct.Struct("<f"), 1  # DT_FLOAT is TensorFlow's number of the type


class Series(NamedTuple):
  """The values of one metric in the order in which they were written.

  Attributes:
    steps: the step of each value.
    times: when each value was written, in seconds since 1970.
    values: the values, which may be infinite or NaN.
  """

  steps: Int[np.ndarray, " n"]
  times: Float[np.ndarray, " n"]
  values: Float[np.ndarray, " n"]

  def take(self, selection: np.ndarray) -> "Series":
    """Returns the values at these indices, or where this mask is True."""
    return Series(*(field[selection] for field in self))


def read_event_file(path: epath.PathLike) -> dict[str, Series]:
  """Returns the scalars of an event file by tag; texts, histograms, images and graphs are left out.

  A million scalars take a few seconds. Damaged records are left out, such as the last one of a file that
  another process is writing. TensorBoard's own reader would import TensorFlow, which takes the memory of GPUs.
  """
  from google.protobuf.message import DecodeError
  from tensorboard.compat.proto.event_pb2 import Event

  data, read_length = epath.Path(path).read_bytes(), struct.Struct("<Q").unpack_from
  rows: dict[str, list[tuple[int, float, float]]] = collections.defaultdict(list)
  end = 0
  while (begin := end + _HEADER) <= len(data):
    end = begin + read_length(data, end)[0] + _FOOTER
    try:
      event = Event.FromString(data[begin : end - _FOOTER])
    except DecodeError:
      continue
    for value in event.summary.value:
      number = _scalar_of(value)
      if number is not None:
        rows[value.tag].append((event.step, event.wall_time, number))
  columns = {tag: np.array(of_tag).T for tag, of_tag in rows.items()}
  return {tag: Series(c[0].astype(np.int64), c[1], c[2]) for tag, c in columns.items()}


def _scalar_of(value: Any) -> float | None:
  """Returns the number of a Summary.Value; None if it is something else."""
  kind = value.WhichOneof("value")
  if kind == "simple_value":
    return float(value.simple_value)
  if kind != "tensor":
    return None
  # A float32 as TensorFlow writes it is read directly: an array for each would take three times as long.
  tensor = value.tensor
  content = tensor.tensor_content
  if tensor.dtype == _DT_FLOAT and len(content) == _FLOAT32.size:
    return float(_FLOAT32.unpack(content)[0])
  from tensorboard.util.tensor_util import make_ndarray

  array = make_ndarray(tensor)
  return float(array.item()) if array.size == 1 and array.dtype.kind in "biuf" else None
