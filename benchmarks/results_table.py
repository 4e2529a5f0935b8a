"""Prints the results of benchmarks/gpu.sh as Markdown tables.

python -m benchmarks.results_table benchmarks/results/gpu
"""

from __future__ import annotations

import datetime
import json
import pathlib
import sys
from typing import Any

STEP_HEAD = (
  "row | batch | ms/step | at least | seq/s per device | TFLOP/s | MFU | peak GB | temporaries, GB | "
  "as planned | compilation, s | switches | HLO"
)
SWITCHES = ("dtype", "kernel", "fp8", "fuse_qkv", "pack", "remat", "loss_chunk", "microbatches")
TEMPORARIES = ("temporaries_gb", "planned_temporaries_gb")
FP8_HEAD = "row | steps | loss | perturbed | in fp8 | fp8 | noise | speed | recommendation"
FAILED_HEAD = "failed row | last line of output"
ATTENTION_HEAD = "attention | kernel | packed | batch x heads | ms forward and backward"


def step_row(name: str, row: dict[str, Any]) -> str:
  """Returns the table row of one training step."""
  cells = [
    name,
    f"{row['batch']} x {row['lengths'][0]}/{row['lengths'][1]}",
    f"{row['step_ms']:.1f}",
    f"{row['least_ms']:.1f}" if row.get("least_ms") else "",
    f"{row['seq_per_s_per_device']:.1f}",
    f"{row['tflops_per_device']:.1f}",
    f"{row['mfu']:.1%}" if row["mfu"] else "",
    f"{row['peak_memory_gb']:.1f}" if row["peak_memory_gb"] else "",
    *(f"{row[name]:.2f}" if name in row else "" for name in TEMPORARIES),
    f"{row['compile_s']:.0f}",
    " ".join(f"{name}={row[name]}" for name in SWITCHES if name in row),
    ", ".join(f"{count} {what}" for what, count in row.get("hlo", {}).items()),
  ]
  return " | ".join(cells)


def fp8_row(name: str, result: dict[str, Any]) -> str:
  """Returns the table row of one comparison of fp8 with bfloat16."""
  plain, perturbed, fp8 = (run["final_loss"] for run in result["runs"].values())
  cells = [
    name,
    f"{result['steps']} of {result['batch']} x {result['lengths'][0]}/{result['lengths'][1]}",
    f"{plain:.4f}",
    f"{perturbed:.4f}",
    f"{fp8:.4f}",
    f"{result['loss_ratio'] - 1:+.2%}",
    f"{result['noise']:.2%}",
    f"{result['speedup']:.2f}x",
    result["recommendation"],
  ]
  return " | ".join(cells)


def attention_row(row: dict[str, Any]) -> str:
  """Returns the table row of one attention kernel."""
  time = f"{row['ms']:.2f}" if "ms" in row else row["error"]
  size = f"{row['batch']} x {row['heads']}"
  return (
    f"{row['attention']} | {row['kernel']} | {'yes' if row['packed'] else 'no'} | {size} | {time}"
  )


def failed_rows(folder: pathlib.Path) -> list[str]:
  """Returns the rows that failed, each with the last line that it printed."""
  rows = []
  for path in sorted(folder.glob("*.failed")):
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing"]
    rows.append(f"{path.stem} | {lines[-1][:200].replace('|', '/')}")
  return rows


def tests_line(folder: pathlib.Path) -> list[str]:
  """Returns pytest's summary of the GPU tests; nothing if they have not run."""
  log = folder / "tests.log"
  lines = log.read_text(encoding="utf-8").strip().splitlines() if log.exists() else []
  return [f"Tests marked `gpu`: {lines[-1].strip('= ')}.", ""] if lines else []


def table(head: str, rows: list[str]) -> list[str]:
  """Returns the lines of a Markdown table; none if there are no rows."""
  if not rows:
    return []
  rule = "| " + " | ".join("---" for _ in head.split(" | ")) + " |"
  return [f"| {head} |", rule, *(f"| {row} |" for row in rows), ""]


def main(folder: str) -> None:
  """Prints devices, versions, the date and the tables."""
  kernels: list[dict[str, Any]] = []
  results: dict[str, dict[str, Any]] = {}
  for path in sorted(pathlib.Path(folder).glob("*.json")):
    found = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(found, list):
      kernels += found
    else:
      results[path.stem] = found
  steps = {name: result for name, result in results.items() if "runs" not in result}
  compared = {name: result for name, result in results.items() if "runs" in result}
  devices = sorted({f"{result['device']}, {result['versions']}" for result in results.values()})
  lines = [f"# Training steps, {datetime.date.today()}", ""]
  lines += [f"{'; '.join(devices)}. Command: `benchmarks/gpu.sh`.", ""]
  lines += tests_line(pathlib.Path(folder))
  lines += table(STEP_HEAD, [step_row(name, row) for name, row in steps.items()])
  lines += table(FP8_HEAD, [fp8_row(name, result) for name, result in compared.items()])
  lines += table(ATTENTION_HEAD, [attention_row(row) for row in kernels])
  lines += table(FAILED_HEAD, failed_rows(pathlib.Path(folder)))
  print("\n".join(lines).rstrip())


if __name__ == "__main__":
  main(sys.argv[1])
