"""`run-log.jsonl`: a line for each start and end of a training run, and for output that was lost."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from rosetta_t5.terminal import lost_output

RUN_LOG = "run-log.jsonl"


def log_event(model_dir: str | os.PathLike[str], event: str, **facts: Any) -> bool:
  """Appends a JSON object to MODEL_DIR/run-log.jsonl, on the first process only.

  Args:
    event: `start`, `end`, `lost` or `restored`.
    **facts: numbers, texts, and lists and dictionaries of them.

  Returns:
    Whether it was written; if not, it is counted as lost.
  """
  import jax  # The report reads the log on machines without it, and faster.

  if jax.process_index() != 0:
    return True
  folder = pathlib.Path(model_dir)
  line = json.dumps({"event": event, "time": time.time(), **facts}) + "\n"
  with lost_output.counted(f"lines of {RUN_LOG}"):
    if event == "start":  # A folder that was moved during the run is not created again.
      folder.mkdir(parents=True, exist_ok=True)
    with open(folder / RUN_LOG, "a", encoding="utf-8", opener=_open_without_waiting) as file:
      file.write(line)
    return True
  return False


def _open_without_waiting(path: str, flags: int) -> int:
  """Opens a file. A pipe that nobody reads is an error, instead of a wait for its reader."""
  return os.open(path, flags | os.O_NONBLOCK, 0o666)


def log_end(model_dir: str | os.PathLike[str], step: int, reason: str, **facts: Any) -> None:
  """Logs the end of a run, and the output that it has lost.

  Args:
    reason: `finished`, `interrupted` or `failed`.
  """
  if lost := lost_output.all_lost():
    facts["lost"] = lost_output.describe(lost)
  log_event(model_dir, "end", step=step, reason=reason, **facts)


@contextlib.contextmanager
def logged_failure(
  model_dir: str | os.PathLike[str], get_step: Callable[[], int]
) -> Iterator[None]:
  """Inside the `with`, an error that ends the run is logged, in case the console is lost."""
  try:
    yield
  except Exception as error:
    log_end(model_dir, get_step(), "failed", error=str(error))
    raise


class LostOutputLog:
  """Reports that a run has lost output, as soon as the log can be written again."""

  def __init__(self, model_dir: str | os.PathLike[str], print_line: Callable[[str], None]):
    """Prepares the log."""
    self._model_dir, self._print_line = model_dir, print_line
    self._reported: set[str] = set()

  def report(self, step: int) -> None:
    """Reports each kind of output once; the end of the run reports how much was lost."""
    lost = lost_output.all_lost()
    if lost.keys() <= self._reported:
      return
    text = lost_output.describe(lost)
    if log_event(self._model_dir, "lost", step=step, output=text):
      self._reported = {*lost}
      self._print_line(f"note     the run continues, but output was lost: {text}")
