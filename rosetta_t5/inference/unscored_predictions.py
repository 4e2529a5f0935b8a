"""What a model has said is kept where a task's metrics fail: it may have taken hours."""

from __future__ import annotations

import concurrent.futures
import json
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath


class MetricError(ValueError):
  """A task's metrics, or what prepares their arguments, raised an error."""


def kept_where_metrics_fail(
  metrics: concurrent.futures.Future[Any],
  outputs: Mapping[str, Mapping[Any, Any]],
  vocabulary_of: Callable[[str], Any],
  folder: epath.Path | None,
  step: int,
) -> concurrent.futures.Future[Any]:
  """Returns the future of the same metrics; if they fail, with a text, and the outputs in files.

  Args:
    metrics: SeqIO's.
    outputs: {task: {kind of output: outputs}}: tokens or scores, in the examples' order.
    vocabulary_of: the vocabulary of a task's predictions.
    folder: where the files go, TASK-STEP.unjudged.jsonl; None for nowhere.
    step: of the model.
  """
  told: concurrent.futures.Future[Any] = concurrent.futures.Future()

  def tell(done: concurrent.futures.Future[Any]) -> None:
    if (error := done.exception()) is None:
      told.set_result(done.result())
      return
    kept = [] if folder is None else _write(folder, outputs, vocabulary_of, step)
    failure = MetricError(_text(error, kept))
    failure.__cause__ = error
    told.set_exception(failure)

  metrics.add_done_callback(tell)
  return told


def _write(
  folder: epath.Path,
  outputs: Mapping[str, Mapping[Any, Any]],
  vocabulary_of: Callable[[str], Any],
  step: int,
) -> list[str]:
  files = []
  for task, kinds in outputs.items():
    file = folder / f"{task}-{step}.unjudged.jsonl"
    with file.open("w") as lines:
      for output in kinds.values():
        for row in output[0] if isinstance(output, tuple) else output:
          said = vocabulary_of(task).decode(row) if isinstance(row, list) else row
          lines.write(json.dumps({"output": said}, ensure_ascii=False) + "\n")
    files.append(str(file))
  return files


def _text(error: BaseException, files: list[str]) -> str:
  cause = error.__cause__ or error
  place = traceback.extract_tb(cause.__traceback__)[-1]
  told = str(error) if error is cause else f"{str(error).partition(': ')[0]}: "
  told += "" if error is cause else f"{type(cause).__name__}: {cause}"
  kept = f". What the model said is kept, a line an example, in {', '.join(files)}" if files else ""
  return (
    f"{told} ({place.filename}, line {place.lineno}, in {place.name}){kept}. Mend the task's "
    "metric_fns or postprocess_fn, and start again"
  )
