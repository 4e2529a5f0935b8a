"""Writes each chart as a PNG for a paper: one column wide, 300 dpi, small fonts, no decoration."""

from __future__ import annotations

import pathlib
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from rosetta_t5.run_report.decimation import decimate, without_repeated_steps
from rosetta_t5.run_report.panels import OTHER, Panel, choose_panels
from rosetta_t5.run_report.run_folder import Run
from rosetta_t5.telemetry.user_errors import ConfigError

_MAX_POINTS = 2000  # more than the pixels of a column
_LABEL_WIDTH = 28  # characters along the vertical axis
_STYLE: dict[Any, Any] = {
  "figure.figsize": (3.35, 2.2),  # inches: a column of most conferences
  "figure.constrained_layout.use": True,
  "font.size": 8,
  "axes.labelsize": 8,
  "axes.titlesize": 8,
  "xtick.labelsize": 7,
  "ytick.labelsize": 7,
  "legend.fontsize": 6.5,
  "legend.frameon": False,
  "lines.linewidth": 1.0,
  "axes.linewidth": 0.6,
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.grid": True,
  "grid.linewidth": 0.4,
  "grid.alpha": 0.4,
  "text.parse_math": False,  # a `$` in a name is only a character
  "savefig.dpi": 300,
}
# Okabe and Ito's colours, which readers with any colour vision can tell apart.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", ":", "--", "-.")


def write_figures(runs: Sequence[Run], folder: pathlib.Path) -> list[pathlib.Path]:
  """Writes a PNG for each chart of training and evaluation, and returns the files.

  Raises:
    ConfigError: matplotlib is not installed, or the folder cannot be written.
  """
  try:
    from matplotlib import pyplot, rc_context
  except ImportError as error:
    raise ConfigError(
      f"--png needs matplotlib, which cannot be imported ({error}): pip install 'rosetta-t5[report]'"
    ) from error
  paths = []
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with rc_context(_STYLE):
      pyplot.switch_backend("agg")
      for panel in choose_panels(runs):
        if panel.section != OTHER:
          figure, axes = pyplot.subplots()
          _draw(axes, panel, runs)
          paths.append(folder / f"{_file_name(panel.title)}.png")
          figure.savefig(paths[-1])
          pyplot.close(figure)
  except OSError as error:
    raise ConfigError(f"--png {folder} cannot be written: {error.strerror}") from error
  return paths


def _draw(axes: Any, panel: Panel, runs: Sequence[Run]) -> None:
  for number, run in enumerate(runs):
    for dash, line in zip(_DASHES * len(panel.lines), panel.lines, strict=False):
      series = run.series.get(line.group, {}).get(line.tag)
      if series is None:
        continue
      curve = decimate(without_repeated_steps(series), _MAX_POINTS)
      color = _COLORS[number % len(_COLORS)]
      label = " · ".join(filter(None, (run.name if len(runs) > 1 else "", line.label)))
      shown = curve.means or curve.points
      if curve.means is not None:
        axes.plot(curve.points.steps, curve.points.values * line.factor, color=color, alpha=0.25)
      marker = "o" if shown.steps.size == 1 else ""
      axes.plot(
        shown.steps, shown.values * line.factor, dash, color=color, label=label, marker=marker
      )
  axes.set_xlabel("Step")
  label = textwrap.fill(panel.title, _LABEL_WIDTH)
  axes.set_ylabel(f"{label}\n({panel.unit})" if panel.unit else label)
  axes.xaxis.set_major_formatter(_engineering())
  if len(axes.get_legend_handles_labels()[1]) > 1:
    axes.figure.legend(loc="outside upper left")


def _engineering() -> Any:
  """Formats steps as 500, 10k, 1.5M."""
  from matplotlib import ticker

  return ticker.EngFormatter(sep="")


def _file_name(title: str) -> str:
  return re.sub(r"[^A-Za-z0-9.]+", "_", title).strip("_").lower()
