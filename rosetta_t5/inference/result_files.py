"""Writes the results of inference: one JSON object per line, in chunks that are merged at the end."""

import concurrent.futures
import contextlib
import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from rosetta_t5 import terminal
from rosetta_t5.argument_types import check_one_of
from rosetta_t5.data.pipeline.data_description import compare_descriptions
from rosetta_t5.data.tensorflow_import import import_seqio
from rosetta_t5.data.vocabularies.task_vocabularies import decode_tokens
from rosetta_t5.files import exclusive_output, read_json_object
from rosetta_t5.inference.infer_fn import array_to_lists

Inferences = tuple[Sequence[Any], Mapping[str, Any]]

MODES = {  # → the method of the model
  "predict": "predict_batch",
  "score": "score_batch",
  "predict_with_aux": "predict_batch_with_aux",
}
COMPLETED = ".COMPLETED"
_SETTINGS = "settings.json"
_PRETOKENIZED = "_pretokenized"


def check_output_dir(binding: str, folder: str) -> None:
  """Checks that files can be written to a folder, which may not exist yet. Skips remote folders.

  Args:
    binding: the name of the gin binding that contains the folder.
    folder: the folder.

  Raises:
    ValueError: nothing can be written to the folder.
  """
  if "://" in folder:
    return
  path = pathlib.Path(folder).absolute()
  existing = next(p for p in (path, *path.parents) if p.exists())
  if not existing.is_dir() or not os.access(existing, os.W_OK):
    raise ValueError(
      f"{binding} = {folder!r} cannot be written: {existing} is not a folder that you may write in. Set "
      "another folder"
    )


def write_inferences_to_file(
  path: str,
  inferences: Inferences,
  task_ds: Any,
  mode: str,
  vocabulary: Any = None,
  json_encoder_cls: type[json.JSONEncoder] | None = None,
  include_all_inputs: bool = False,
  input_fields_to_include: Sequence[str] | None = None,
  output_ids: bool = False,
) -> None:
  """Writes a JSON object per line: `inputs`, `prediction` or `score`, and `aux` (T5X's function).

  Args:
    path: the file.
    inferences: (predictions or scores, {name: auxiliary values}), in the order of the examples.
    task_ds: the task's examples, a tf.data.Dataset.
    mode: 'predict', 'score' or 'predict_with_aux'.
    vocabulary: decodes predicted tokens.
    json_encoder_cls: encodes types that JSON lacks; None for SeqIO's TensorAndNumpyEncoder.
    include_all_inputs: whether to write all features of the examples. By default only their texts
      (`*_pretokenized`) are written.
    input_fields_to_include: the features to write, together with their texts.
    output_ids: whether to write the predicted tokens too, as `prediction_tokens`, up to the first 0.

  Raises:
    ValueError: arguments are missing or contradict each other.
  """
  check_one_of("infer.mode", mode, MODES)
  if mode != "score" and vocabulary is None:
    raise ValueError(f"write_inferences_to_file needs a vocabulary in mode {mode!r}: give one")
  if include_all_inputs and input_fields_to_include is not None:
    raise ValueError("both include_all_inputs and input_fields_to_include are given: leave one out")
  outputs, aux = inferences
  encoder = json_encoder_cls or import_seqio().TensorAndNumpyEncoder

  def is_included(name: str) -> bool:
    if input_fields_to_include is not None:
      return name.removesuffix(_PRETOKENIZED) in input_fields_to_include
    return include_all_inputs or name.endswith(_PRETOKENIZED)

  with epath.Path(path).open("w", encoding="utf-8") as file:
    for row, example in enumerate(task_ds.as_numpy_iterator()):
      inputs = {name: _to_json(x) for name, x in example.items() if is_included(name)}
      written: dict[str, Any] = {"inputs": inputs}
      if mode == "score":
        written["score"] = _to_json(outputs[row])
      else:
        written["prediction"] = _to_json(decode_tokens(vocabulary, outputs[row]))
      if output_ids and mode != "score":
        tokens = _to_json(outputs[row])
        written["prediction_tokens"] = tokens[: [*tokens, 0].index(0)]
      if mode == "predict_with_aux" or aux:
        written["aux"] = _aux_of_row(aux, row)
      file.write(json.dumps(written, cls=encoder, ensure_ascii=False) + "\n")


def _aux_of_row(aux: Mapping[str, Any], row: int) -> Any:
  return jax.tree.map(
    lambda column: _to_json(column[row]), aux, is_leaf=lambda x: isinstance(x, list | np.ndarray)
  )


def _to_json(value: Any) -> Any:
  """Converts bytes to text, and arrays to numbers and lists."""
  if isinstance(value, bytes):
    return value.decode("utf-8", errors="backslashreplace")
  if isinstance(value, np.ndarray | np.generic | jax.Array):
    return _to_json(array_to_lists(np.asarray(value)))
  if isinstance(value, list | tuple):
    return [_to_json(item) for item in value]
  return value


class TaskResults:
  """The result file of a task, and the chunks NAME-chunk00000, NAME-chunk00001, … that it is made of.

  A run that was killed continues after the complete chunks. A chunk is complete if there is a file of the
  same name with the suffix `.COMPLETED`; so is the result file, whose second file contains the settings
  with which it was computed. T5X's is empty.

  Attributes:
    path: the result file.
    folder: the folder of the chunks.
  """

  def __init__(self, path: str, folder: str, settings: Mapping[str, Any]):
    """Describes the files.

    Args:
      path: the result file.
      folder: the folder of the chunks, which need not exist.
      settings: what determines the results (batch size, checkpoint, …); JSON can represent it.
    """
    self.path, self.folder, self._settings = path, epath.Path(folder), settings

  def is_complete(self) -> bool:
    """Returns whether the results are there; raises ValueError if other settings have given them."""
    marker = epath.Path(self.path + COMPLETED)
    if marker.exists() and marker.read_text():
      check_same_settings(marker, self._settings, marker)
    return marker.exists()

  @contextlib.contextmanager
  def opened(self) -> Iterator[int]:
    """Yields the number of complete chunks; others can be written, and no other command can write them.

    Raises:
      ValueError: an earlier run with other settings has left chunks, or another command writes them.
    """
    with contextlib.ExitStack() as stack:
      if jax.process_index() == 0:
        self.folder.mkdir(parents=True, exist_ok=True)
        if "://" not in os.fspath(self.folder):
          stack.enter_context(exclusive_output(self.folder))
      file = self.folder / _SETTINGS
      # Without a complete chunk the settings may change, for example after running out of memory.
      if file.exists() and epath.Path(self.chunk(0) + COMPLETED).exists():
        check_same_settings(file, self._settings, self.folder)
      elif jax.process_index() == 0:
        file.write_text(json.dumps(self._settings))
      if first := self.num_complete():
        terminal.print_line(f"continuing after {first} chunks in {self.folder}")
      yield first

  def chunk(self, number: int) -> str:
    """Returns the path of a chunk."""
    return os.fspath(self.folder / f"{os.path.basename(self.path)}-chunk{number:05}")

  def write(
    self, write_fn: Callable[..., None], mode: str, vocabulary: Any, number: int, *chunk: Any
  ) -> None:
    """Writes a chunk, which consists of inferences and examples, and records that it is complete."""
    write_fn(self.chunk(number), *chunk, mode, vocabulary)
    epath.Path(self.chunk(number) + COMPLETED).write_text("")

  def num_complete(self) -> int:
    """Returns the number of complete chunks before the first incomplete one, on all processes."""
    markers = (epath.Path(self.chunk(number) + COMPLETED) for number in itertools.count())
    number = next(n for n, marker in enumerate(markers) if not marker.exists())
    # The first process writes the files, so the others may not see all of them yet.
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))

  def finish(self, step: int, merge_fn: Callable[..., None] | None) -> None:
    """Merges the chunks on the first process, then removes them; the other processes wait."""
    output_dir, name = os.path.split(self.path)
    if not self.num_complete():
      raise ValueError(
        f"the data for {name} has no examples: its split is empty, or has fewer examples than "
        "infer.num_shards. Check DatasetConfig.split and the task's files"
      )
    if jax.process_index() == 0:
      if merge_fn is not None:
        merge_fn(output_dir, name, os.fspath(self.folder), step)
      epath.Path(self.path + COMPLETED).write_text(json.dumps(self._settings))
      if merge_fn is not None:
        self.folder.rmtree()
    terminal.print_line(f"results  {self.path if merge_fn is not None else self.folder}")
    multihost_utils.sync_global_devices(f"{name}:complete")


def check_same_settings(
  file: epath.PathLike, settings: Mapping[str, Any], to_remove: epath.PathLike
) -> None:
  """Checks that the results of an earlier run are those that this run would compute.

  Args:
    file: contains the settings of the earlier run, as JSON.
    settings: those of this run.
    to_remove: what the user would remove to compute the results again.

  Raises:
    ValueError: the settings differ.
  """
  if changes := compare_descriptions(read_json_object(file), json.loads(json.dumps(settings))):
    raise ValueError(
      f"{os.fspath(to_remove).removesuffix(COMPLETED)} contains the results of an earlier run. Changed "
      f"since: {'; '.join(changes)}. Undo this to use them, or remove {to_remove} to compute new ones"
    )


def merge_chunks_to_file(
  output_dir: str, output_fname: str, tmp_dir: str, step: int | None
) -> None:
  """Concatenates the chunks `tmp_dir/output_fname-chunk00000` and so on, up to a gap (T5X's function).

  Args:
    output_dir: the folder of the merged file.
    output_fname: the name of the merged file.
    tmp_dir: the folder of the chunks.
    step: the checkpoint's step. It is not used here, but functions that replace this one may use it.
  """
  folder = epath.Path(tmp_dir)
  chunks = (folder / f"{output_fname}-chunk{number:05}" for number in itertools.count())
  unfinished = folder / f"{output_fname}.unfinished"
  with unfinished.open("wb") as merged:
    for chunk in itertools.takewhile(lambda chunk: chunk.exists(), chunks):
      with chunk.open("rb") as part:
        shutil.copyfileobj(part, merged)
  unfinished.replace(epath.Path(output_dir) / output_fname)


class FailFastThreadPoolExecutor(concurrent.futures.ThreadPoolExecutor):
  """Runs functions in threads; an error of one is raised by the next `submit` (T5X's class)."""

  def __init__(self, *args: Any, **kwargs: Any):
    super().__init__(*args, **kwargs)
    self._unchecked: list[concurrent.futures.Future[Any]] = []

  def check_for_exceptions(self, wait: bool = False) -> None:
    """Raises the first error of a submitted call. With `wait`, waits for calls that still run."""
    for future in list(self._unchecked):
      if wait or future.done():
        self._unchecked.remove(future)
        future.result()

  def submit(
    self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
  ) -> concurrent.futures.Future[Any]:
    """Queues a call. Raises the error of an earlier one."""
    self.check_for_exceptions()
    future = super().submit(fn, *args, **kwargs)
    self._unchecked.append(future)
    return future

  def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
    """Ends the threads. With `wait`, waits for all calls and raises the first error."""
    try:
      self.check_for_exceptions(wait=wait)
    finally:
      super().shutdown(wait=wait, cancel_futures=cancel_futures)
