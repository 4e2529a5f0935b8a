"""The folder in which a task's results grow, chunk by chunk, so that a killed run can go on."""

from __future__ import annotations

import concurrent.futures
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

COMPLETED = ".COMPLETED"
_SETTINGS = "settings.json"


class ChunkFolder:
  """Chunks `NAME-chunk00000`, …; one is complete when a file `….COMPLETED` lies beside it."""

  def __init__(self, folder: str | os.PathLike[str], name: str, settings: Mapping[str, Any]):
    """Opens the folder, if an earlier run has left one; else makes it.

    Args:
      folder: where the chunks go.
      name: what they are called.
      settings: what decides about their content (batch size, checkpoint, …), as JSON knows it.

    Raises:
      ValueError: an earlier run with other settings has left it, and chunks in it.
    """
    self.path = epath.Path(folder)
    self._name = name
    settings = json.loads(json.dumps(settings))
    file = self.path / _SETTINGS
    # Without a chunk nothing can be mixed: a run may go on otherwise, as where memory was full.
    if file.exists() and epath.Path(self.chunk(0) + COMPLETED).exists():
      _check_same(json.loads(file.read_text()), settings, self.path)
    elif jax.process_index() == 0:
      self.path.mkdir(parents=True, exist_ok=True)
      file.write_text(json.dumps(settings))

  def chunk(self, number: int) -> str:
    """Returns the path of a chunk."""
    return os.fspath(self.path / f"{self._name}-chunk{number:05}")

  def mark_complete(self, number: int) -> None:
    """Says that a chunk is written as a whole."""
    epath.Path(self.chunk(number) + COMPLETED).write_text("")

  def num_complete(self) -> int:
    """Returns how many chunks from the first on are complete; the same on every process."""
    number = 0
    while epath.Path(self.chunk(number) + COMPLETED).exists():
      number += 1
    if jax.process_count() > 1:
      from jax.experimental import multihost_utils

      # The first process writes, so it alone is sure to see what is there.
      number = int(multihost_utils.broadcast_one_to_all(np.int32(number)))
    return number


class FailFastThreadPoolExecutor(concurrent.futures.ThreadPoolExecutor):
  """Runs functions in threads; what one of them raises is raised at the next call (T5X's class)."""

  def __init__(self, *args: Any, **kwargs: Any):
    super().__init__(*args, **kwargs)
    self._unchecked: list[concurrent.futures.Future[Any]] = []

  def check_for_exceptions(self, wait: bool = False) -> None:
    """Raises what a function has raised; `wait` waits for those that still run."""
    for future in list(self._unchecked):
      if wait or future.done():
        self._unchecked.remove(future)
        future.result()

  def submit(
    self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
  ) -> concurrent.futures.Future[Any]:
    """Queues a call; raises what an earlier one has raised."""
    self.check_for_exceptions()
    future = super().submit(fn, *args, **kwargs)
    self._unchecked.append(future)
    return future

  def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
    """Ends the threads; with `wait`, raises what a call has raised."""
    try:
      self.check_for_exceptions(wait=wait)
    finally:
      super().shutdown(wait=wait, cancel_futures=cancel_futures)


def _check_same(found: Mapping[str, Any], wanted: Mapping[str, Any], folder: epath.Path) -> None:
  differences = [
    f"{name} was {found.get(name)!r} and is {wanted.get(name)!r}"
    for name in sorted({*found, *wanted})
    if found.get(name) != wanted.get(name)
  ]
  if differences:
    raise ValueError(
      f"{folder} holds the chunks of an earlier run, and {'; '.join(differences)}. Set it back to go "
      "on with that run, or remove the folder to begin anew"
    )
