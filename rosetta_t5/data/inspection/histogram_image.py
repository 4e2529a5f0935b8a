"""Histograms as a PNG, drawn with Pillow, which TensorBoard brings."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

_PLOT = (360, 200)  # pixels of one histogram
_MARGIN = 30
_BINS = 60
_INK, _BAR = (40, 40, 40), (70, 110, 180)


def draw_histograms(
  path: str | os.PathLike[str],
  lengths: Mapping[str, tuple[list[int], int]],
  counts_of_ids: np.ndarray,
) -> None:
  """Writes one histogram beside the other.

  Args:
    path: the PNG's.
    lengths: for each feature its examples' lengths and the length of a row.
    counts_of_ids: how often each id of the vocabulary was seen; drawn to a logarithmic scale.
  """
  from PIL import Image, ImageDraw

  plots = [
    (f"tokens of {name}, 0 to {room}", np.histogram(values, bins=_BINS, range=(0, room))[0])
    for name, (values, room) in lengths.items()
  ]
  parts = np.array_split(counts_of_ids, _BINS)
  title = f"tokens by id, 0 to {len(counts_of_ids)}, log(1 + count)"
  plots.append((title, np.log1p([part.sum() for part in parts])))
  width, height = _PLOT
  size = (len(plots) * (width + _MARGIN) + _MARGIN, height + 2 * _MARGIN)
  image = Image.new("RGB", size, "white")
  draw = ImageDraw.Draw(image)
  for number, (text, heights) in enumerate(plots):
    left, bottom = _MARGIN + number * (width + _MARGIN), _MARGIN + height
    step = width / _BINS
    for place, value in enumerate(heights / max(heights.max(), 1)):
      right = left + (place + 1) * step - 1
      draw.rectangle((left + place * step, bottom - value * height, right, bottom), fill=_BAR)
    draw.line((left, bottom, left + width, bottom), fill=_INK)
    draw.text((left, bottom + 8), text, fill=_INK)
    draw.text((left, 8), f"highest bar: {heights.max():.5g}", fill=_INK)
  image.save(path, format="PNG")
