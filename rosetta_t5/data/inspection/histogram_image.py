"""Draws histograms into a PNG file with Pillow, which TensorBoard depends on."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

_WIDTH, _HEIGHT = 360, 200  # pixels of one histogram
_MARGIN = 30
_TEXT_COLOR, _BAR_COLOR = (40, 40, 40), (70, 110, 180)


def draw_histograms(
  path: str | os.PathLike[str], histograms: Sequence[tuple[str, np.ndarray]]
) -> None:
  """Writes a PNG with the histograms side by side.

  Args:
    path: the file to write.
    histograms: for each its title and the heights of its bars.
  """
  from PIL import Image, ImageDraw

  size = (len(histograms) * (_WIDTH + _MARGIN) + _MARGIN, _HEIGHT + 2 * _MARGIN)
  image = Image.new("RGB", size, "white")
  draw = ImageDraw.Draw(image)
  bottom = _MARGIN + _HEIGHT
  for number, (title, heights) in enumerate(histograms):
    left = _MARGIN + number * (_WIDTH + _MARGIN)
    step = _WIDTH / len(heights)
    for index, value in enumerate(heights / max(heights.max(), 1)):
      start = left + index * step
      draw.rectangle((start, bottom - value * _HEIGHT, start + step - 1, bottom), fill=_BAR_COLOR)
    draw.line((left, bottom, left + _WIDTH, bottom), fill=_TEXT_COLOR)
    draw.text((left, bottom + 8), title, fill=_TEXT_COLOR)
    draw.text((left, 8), f"highest bar: {heights.max():.5g}", fill=_TEXT_COLOR)
  image.save(path, format="PNG")
