"""`run-log.jsonl`: a line for each start and each end of a training run."""

from __future__ import annotations

import json
import os
import pathlib
import time
from typing import Any

RUN_LOG = "run-log.jsonl"


def log_event(model_dir: str | os.PathLike[str], event: str, **facts: Any) -> None:
  """Appends a JSON object to MODEL_DIR/run-log.jsonl, on the first process only.

  Args:
    model_dir: the run's folder; created if absent.
    event: `start` or `end`.
    **facts: numbers, texts, and lists and dictionaries of them.
  """
  import jax  # The report reads the log on machines without it, and faster.

  if jax.process_index() != 0:
    return
  folder = pathlib.Path(model_dir)
  folder.mkdir(parents=True, exist_ok=True)
  with (folder / RUN_LOG).open("a", encoding="utf-8") as file:
    file.write(json.dumps({"event": event, "time": time.time(), **facts}) + "\n")
