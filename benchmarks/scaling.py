"""Plans T5 1.1 xl and T5Gemma 9b-9b on 8 to 4,096 H100s, and draws their estimated scaling.

python -m benchmarks.scaling --json scaling.json --svg docs/scaling.svg

Nothing is measured: each point is the fastest configuration of `rosetta-t5 plan`. With weak scaling each GPU keeps its
number of examples; with strong scaling the batch stays the same.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

_CHOICE = re.compile(r"^1\. +(?P<mesh>.*?): .*?([\d.,]+) sequences/s, (?P<memory>\S+ GB)", re.M)


class Case(NamedTuple):
  """A recipe, its examples per GPU with weak scaling, and its batch with strong scaling."""

  name: str
  recipe: tuple[str, ...]
  per_gpu: int
  batch: int


_LENGTHS = "--gin.TASK_FEATURE_LENGTHS={'inputs': 1024, 'targets': 1024}"
CASES = (
  Case("T5 1.1 xl, 512/128 tokens", ("gin/examples/xl_pile_pretrain.gin",), 16, 4096),
  Case(
    "T5Gemma 9b-9b, 1024/1024 tokens",
    (
      "gin/models/t5gemma/9b_9b.gin",
      "gin/runs/pretrain_pile.gin",
      "gin/optimizers/adamw.gin",
      _LENGTHS,
      "--gin.MIXTURE_OR_TASK_NAME='the_pile_span_corruption'",
      "--gin.MIXTURE_OR_TASK_MODULE='t5x.contrib.gpu.scripts_gpu.seqio_tasks'",
      "--gin.TRAIN_STEPS=1000",
      "--gin.DROPOUT_RATE=0.0",
    ),
    4,
    1024,
  ),
)


def plan(case: Case, gpus: int, batch: int) -> tuple[str, float, str] | None:
  """Returns mesh, sequences per second and memory of the fastest plan; None if nothing fits."""
  command = [sys.executable, "-m", "rosetta_t5.cli", "plan", *case.recipe]
  command += [f"--devices={gpus}", f"--gin.BATCH_SIZE={batch}"]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  found = _CHOICE.search(done.stdout)
  if found is None:
    print(f"{case.name}, {gpus} GPUs, batch {batch}: {(done.stdout + done.stderr)[-400:]}")
    return None
  return found["mesh"], float(found[2].replace(",", "")), found["memory"]


def main() -> None:
  """Plans every point, prints tables, and draws the efficiency."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--json", type=pathlib.Path, required=True)
  parser.add_argument("--svg", type=pathlib.Path)
  parser.add_argument("--gpus", type=int, nargs="+", default=(8, 64, 256, 1024, 4096))
  options = parser.parse_args()
  points = json.loads(options.json.read_text()) if options.json.exists() else {}
  for case in CASES:
    for gpus in options.gpus:
      for kind, batch in (("weak", case.per_gpu * gpus), ("strong", case.batch)):
        key = f"{case.name}|{kind}|{gpus}"
        if key not in points and batch >= gpus:
          points[key] = plan(case, gpus, batch)
          options.json.write_text(json.dumps(points, indent=1))
  curves: dict[str, list[tuple[int, float]]] = {}
  for case in CASES:
    for kind in ("weak", "strong"):
      print(
        f"\n{case.name}, {kind} scaling\n\n| GPUs | mesh | on each GPU | sequences/s | efficiency |"
      )
      print("| --- | --- | --- | --- | --- |")
      rows = [(gpus, points.get(f"{case.name}|{kind}|{gpus}")) for gpus in options.gpus]
      planned = [(gpus, row) for gpus, row in rows if row]
      first_gpus, first = planned[0]
      for gpus, (mesh, speed, memory) in planned:
        share = speed / gpus / (first[1] / first_gpus)
        curves.setdefault(f"{case.name}, {kind}", []).append((gpus, share))
        print(f"| {gpus:,} | {mesh} | {memory} | {speed:,.0f} | {share:.0%} |")
  if options.svg:
    draw(curves, options.gpus, options.svg)


def draw(
  curves: dict[str, list[tuple[int, float]]], gpus: Sequence[int], path: pathlib.Path
) -> None:
  """Draws the efficiency over the number of GPUs."""
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
  for number, (name, curve) in enumerate(curves.items()):
    style = {"color": ("#3b6fd4", "#d9702b")[number // 2], "linestyle": ("-", "--")[number % 2]}
    axes.plot(*zip(*curve, strict=True), marker="o", markersize=4, label=name, **style)
  axes.axhline(0.8, color="#999999", linewidth=0.8)
  axes.set(xscale="log", xticks=gpus, xticklabels=gpus, ylim=(0, 1.4))
  axes.set(xlabel="GPUs", ylabel="speed per GPU, relative to 8 GPUs")
  axes.minorticks_off()
  axes.legend(fontsize=8, loc="lower left")
  figure.savefig(path)


if __name__ == "__main__":
  main()
