"""Folders like those that training runs leave, written in milliseconds."""

from __future__ import annotations

import json
import math
import pathlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from tensorboard.compat.proto import event_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

STARTED = 1_790_000_000.0
SECONDS_PER_STEP = 0.5


def add_event_file(
  folder: pathlib.Path,
  scalars: Sequence[tuple[int, Mapping[str, float]]],
  *,
  started: float = STARTED,
  as_tensors: bool = True,
) -> pathlib.Path:
  """Writes an event file of (step, {tag: value}), as clu's writer does or with simple values."""
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / f"events.out.tfevents.{int(started)}.host.1.0.v2"
  with path.open("wb") as file:
    writer = RecordWriter(file)

    def write(step: int = 0, time: float = started, **fields: Any) -> Any:
      event = event_pb2.Event(wall_time=time, step=step, **fields)
      writer.write(event.SerializeToString())

    write(file_version="brain.Event:2")
    first = scalars[0][0] if scalars else 0
    for step, values in scalars:
      for tag, value in values.items():
        time = started + (step - first) * SECONDS_PER_STEP
        write(step, time, summary=_scalar_summary(tag, value, as_tensors))
  return path


def _scalar_summary(tag: str, value: float, as_tensor: bool) -> Any:
  summary = event_pb2.Event().summary
  entry = summary.value.add(tag=tag)
  if not as_tensor:
    entry.simple_value = value
    return summary
  entry.metadata.plugin_data.plugin_name = "scalars"
  entry.tensor.dtype = 1
  entry.tensor.tensor_shape.SetInParent()
  entry.tensor.tensor_content = struct.pack("<f", value)
  return summary


def training_metrics(
  steps: Sequence[int], scale: float = 1.0
) -> list[tuple[int, dict[str, float]]]:
  """Returns what a run writes at each of these steps."""
  rows = []
  for step in steps:
    loss = scale * (2.2 + 6.5 / math.sqrt(1 + step / 15)) + 0.15 * math.sin(step * 1.7)
    rows.append(
      (
        step,
        {
          "loss": loss * 900,
          "loss_per_nonpadding_target_token": loss,
          "cross_ent_loss_per_all_target_tokens": loss * 0.97,
          "z_loss_per_all_target_tokens": 0.01 / (1 + step / 50),
          "accuracy": 0.62 - 0.6 / math.sqrt(1 + step / 10),
          "learning_rate/current": 0.01 * min(step / 100, math.sqrt(100 / max(step, 1))),
          "weight_gradient_norm": 1.5 + 1 / (1 + step / 100) + 0.2 * math.cos(step),
          "timing/seqs_per_second": 5600 * scale + 40 * math.sin(step),
          "timing/seqs_per_second_per_core": (5600 * scale + 40 * math.sin(step)) / 8,
          "timing/model_flops_utilization": 0.43 * scale,
          "timing/feed_wait_seconds": 0.002 + 0.001 * math.sin(step) ** 2,
          "memory/device_peak_gib": 61.5,
          "memory/host_peak_gib": 12.0 + step / 1000,
        },
      )
    )
  return rows


CONFIG = """from __gin__ import dynamic_registration
from t5x import utils

# Macros:
# ==============================================================================
BATCH_SIZE = {batch_size}
TASK_FEATURE_LENGTHS = {{'inputs': 512, 'targets': 114}}
TRAIN_STEPS = 1000000
NOTES = 'a baseline'
TAGS = ('pile', 'small')

# Parameters for network.T5Config:
# ==============================================================================
network.T5Config.dtype = 'bfloat16'
network.T5Config.mlp_activations = ('gelu', 'linear')
utils.create_learning_rate_scheduler.factors = \\
    'constant * rsqrt_decay'
train/utils.DatasetConfig.batch_size = %BATCH_SIZE
"""
MODEL_INFO = """\
Variable decoder/layers_0/mlp/wi_0/kernel    size 1048576      shape (embed=512, mlp=2048)    partition spec (None, 'model')
Variable token_embedder/embedding            size 16449536     shape (vocab=32128, embed=512) partition spec ('model', None)
Variable encoder/encoder_norm/scale          size 512          shape (embed=512)              partition spec (None,)
Total number of parameters: 76961152

Variable step                                size 1            shape ()                       partition spec None
"""
FACTS = {
  "header": "model     EncoderDecoderModel, 76,961,152 parameters\ndevices   8 NVIDIA H100 80GB HBM3 devices, "
  "mesh data=4 model=2\ncomputes  bfloat16; fp8 off; attention by flash",
  "total_steps": 1_000_000,
  "device": "NVIDIA H100 80GB HBM3",
  "devices": 8,
  "mesh": {"data": 4, "model": 2},
  "batch_size": 2048,
  "lengths": {"encoder_input_tokens": 512, "decoder_target_tokens": 114},
}


def write_run(folder: pathlib.Path, *, scale: float = 1.0, batch_size: int = 2048) -> pathlib.Path:
  """Writes a run that was preempted at step 300, lost at step 640, and is finished at step 1000."""
  starts = ((0, 300), (300, 640), (600, 1000))  # It repeats the steps after its last checkpoint.
  log = []
  for number, (first, last) in enumerate(starts):
    started = STARTED + first * SECONDS_PER_STEP + 60 * number
    rows = [(first, {"timing/init_or_restore_seconds": 20.0})]
    rows += training_metrics(range(first + 10, last + 1, 10), scale)
    rows += [(s, {"timing/checkpoint_seconds": 1.0}) for s in range(first + 100, last + 1, 100)]
    add_event_file(folder / "train", rows, started=started)
    log.append({"event": "start", "time": started + 1, "step": first, **FACTS})
    ended = started + (last - first) * SECONDS_PER_STEP + 2
    if last != 640:
      reason = "finished" if last == 1000 else "interrupted"
      log.append({"event": "end", "time": ended, "step": last, "reason": reason})
  evaluations = [
    (step, {"loss_per_nonpadding_target_token": scale * (2.5 + 60 / (10 + step)), "accuracy": 0.5})
    for step in range(0, 1001, 200)
  ]
  add_event_file(folder / "training_eval" / "c4", evaluations)
  scores = [(step, {"eval/em": step / 13, "eval/f1": step / 11}) for step in range(200, 1001, 200)]
  add_event_file(folder / "inference_eval" / "squad_v010_allanswers", scores)
  add_event_file(
    folder / "inference_eval" / "glue_mnli_matched_v002", [(1000, {"eval/accuracy": 83.1})]
  )
  for step in (200, 1000):
    add_predictions(folder, step, "Denver Broncos" if step == 1000 else "the")
  (folder / "run-log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
  (folder / "config.gin").write_text(CONFIG.format(batch_size=batch_size))
  (folder / "model-info.txt").write_text(MODEL_INFO)
  for step in (900, 1000):
    (folder / f"checkpoint_{step}").mkdir()
  return folder


def add_predictions(
  folder: pathlib.Path, step: int, prediction: str, task: str = "squad_v010_allanswers"
) -> None:
  """Writes predictions as SeqIO's JSONLogger does."""
  row = {
    "input": {
      "inputs_pretokenized": "question: Which team won Super Bowl 50? context: The Denver Broncos "
      "defeated the Carolina Panthers 24–10 to earn their third title.",
      "targets_pretokenized": "Denver Broncos",
    },
    "target": "Denver Broncos",
    "prediction": prediction,
  }
  path = folder / "inference_eval" / f"{task}-{step:06}.jsonl"
  path.write_text(json.dumps(row) + "\n" + json.dumps(row | {"prediction": "Carolina"}) + "\n")
