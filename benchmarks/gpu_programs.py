"""Compiles our recipes for GPUs that need not be here, and compares the bounds with measured speeds.

  .venv-gpu/bin/python -m benchmarks.gpu_programs --results /tmp/programs [--rows small large]

The rows are those of NVIDIA's T5X, with its measured sequences per second and GPU, and each size on
H200. A row with a JSON file in the folder is not compiled again. The table is printed as Markdown.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

_DATASET = "--gin.train/utils.DatasetConfig"
_NETWORK = "--gin.network.T5Config"
_FLASH = f"{_NETWORK}.attention_kernel='flash'"
_CUDNN = [f"{_NETWORK}.attention_kernel='cudnn'", f"{_DATASET}.pack=False"]
_NO_DROPOUT = "--gin.DROPOUT_RATE=0.0"
_MINIMAL = f"{_NETWORK}.remat_policy='minimal'"
_FP8 = [
  "--gin.train.te_config_cls=@te_helper.TransformerEngineConfig",
  "--gin.te_helper.TransformerEngineConfig.enabled=1",
]


class Row(NamedTuple):
  """A program: its recipe, GPUs, global batch and arguments, and NVIDIA's seq/s per GPU, if known."""

  recipe: str
  gpu: str
  devices: int
  batch: int
  arguments: Sequence[str]
  measured: float | None = None


ROWS = {
  "small": Row("small", "h200", 1, 256, [*_CUDNN, _NO_DROPOUT]),
  "base": Row("base", "h200", 1, 128, [*_CUDNN, _NO_DROPOUT]),
  "large": Row("large", "h200", 1, 64, [*_CUDNN, _NO_DROPOUT]),
  "xl": Row("xl", "h200", 1, 24, [*_CUDNN, _MINIMAL]),
  "xxl-8": Row("xxl", "h200", 8, 128, [*_CUDNN, _MINIMAL, '--mesh={"fsdp": 8}']),
  "large-64": Row("large", "h200", 64, 4096, [*_CUDNN, _NO_DROPOUT]),
  "nvidia-small-8": Row("small", "a100", 8, 2048, [_FLASH], 714),
  "nvidia-large-64": Row("large", "a100", 64, 2048, [_FLASH], 75.8),
  "nvidia-large-64-fp8": Row("large", "h100", 64, 2048, [_FLASH, *_FP8], 174.1),
  "nvidia-xl-144": Row("xl", "a100", 144, 2016, [_FLASH, '--mesh={"data": 18, "fsdp": 8}'], 21.0),
  "nvidia-xl-144-fp8": Row(
    "xl", "h100", 144, 2016, [_FLASH, *_FP8, '--mesh={"data": 18, "fsdp": 8}'], 50.4
  ),
  "nvidia-xl-256": Row("xl", "a100", 256, 2048, [_FLASH, '--mesh={"data": 32, "fsdp": 8}'], 16.9),
  "nvidia-xl-256-fp8": Row(
    "xl", "h100", 256, 2048, [_FLASH, *_FP8, '--mesh={"data": 32, "fsdp": 8}'], 37.8
  ),
  "nvidia-xxl-512": Row(
    "xxl", "a100", 512, 2304, [_FLASH, _MINIMAL, '--mesh={"data": 64, "tensor": 8}'], 3.69
  ),
}


def compile_row(name: str, folder: pathlib.Path) -> dict[str, Any]:
  """Returns what `rosetta-t5 compile` writes for a row."""
  row, file = ROWS[name], folder / f"{name}.json"
  if not file.exists():
    command = [sys.executable, "-m", "rosetta_t5.cli", "compile"]
    command += [f"gin/examples/{row.recipe}_pile_pretrain.gin", f"--gpu={row.gpu}"]
    command += [f"--devices={row.devices}", f"{_DATASET}.batch_size={row.batch}", *row.arguments]
    with (folder / f"{name}.txt").open("w") as output:
      subprocess.run([*command, f"--json={file}"], stdout=output, stderr=output, check=True)
  return json.loads(file.read_text())


def table_line(name: str, result: dict[str, Any]) -> str:
  """Returns a line of the table."""
  row = ROWS[name]
  bounds = {bound: 1e3 * seconds for bound, seconds in result["seconds_by_bound"].items()}
  speed = result["most_sequences_per_second"] / row.devices
  measured = f"{row.measured:g} ({row.measured / speed:.0%})" if row.measured else ""
  kernels = sum(kind["count"] for kind in result["kernels_by_kind"].values())
  cells = [
    f"{row.recipe}, {row.devices} {result['gpu']}, batch {row.batch}",
    f"{result['compile_seconds']:.0f} s",
    f"{result['memory']['peak'] / 1e9:.1f} GB",
    f"{kernels:.0f}",
    *(f"{bounds[bound]:.1f}" for bound in ("matmuls", "memory", "launches", "interconnect")),
    f"{speed:.4g}",
    f"{result['largest_mfu']:.0%}",
    measured,
  ]
  return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
  """Compiles the rows and prints the table."""
  parser = argparse.ArgumentParser("python -m benchmarks.gpu_programs")
  parser.add_argument("--results", type=pathlib.Path, required=True, help="folder for JSON files")
  parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
  args = parser.parse_args(argv)
  args.results.mkdir(parents=True, exist_ok=True)
  lines = [table_line(name, compile_row(name, args.results)) for name in args.rows]
  header = (
    "| program | compiled in | memory | kernels | matmuls, ms | memory, ms | launches, ms | "
    "waiting for links, ms | seq/s per GPU, at most | MFU, at most | measured by NVIDIA |"
  )
  print("\n".join([header, "|" + " --- |" * 11, *lines]))


if __name__ == "__main__":
  main()
