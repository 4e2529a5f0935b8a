"""Files of results: a JSON object a line, in chunks that are merged in the end."""

from __future__ import annotations

import json
import pathlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_seqio
from rosetta_t5.data.vocabularies.task_vocabularies import decode_tokens

Inferences = tuple[Sequence[Any], Mapping[str, Any]]

MODES = ("predict", "score", "predict_with_aux")
_PRETOKENIZED = "_pretokenized"


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
  """Writes a JSON object a line: `inputs`, `prediction` or `score`, and `aux` (T5X's function).

  Args:
    path: the file.
    inferences: (predictions or scores, {name: auxiliary values}), in the order of the examples.
    task_ds: the examples as the task makes them, a tf.data.Dataset.
    mode: 'predict', 'score' or 'predict_with_aux'.
    vocabulary: turns predicted tokens into text.
    json_encoder_cls: encodes what JSON does not know; None for SeqIO's TensorAndNumpyEncoder.
    include_all_inputs: write all features of the examples, not only their texts (`*_pretokenized`).
    input_fields_to_include: the features to write, with their texts.
    output_ids: write the predicted tokens too, as `prediction_tokens`, up to the first 0.

  Raises:
    ValueError: arguments are missing or contradict each other.
  """
  check_mode(mode)
  if mode != "score" and vocabulary is None:
    raise ValueError(f"write_inferences_to_file needs a vocabulary in mode {mode!r}: give one")
  if include_all_inputs and input_fields_to_include is not None:
    raise ValueError(
      "write_inferences_to_file was given both include_all_inputs and input_fields_to_include: "
      "leave one of them out"
    )
  outputs, aux = inferences
  encoder = json_encoder_cls or import_seqio().TensorAndNumpyEncoder

  def kept(name: str) -> bool:
    if input_fields_to_include is not None:
      return name.removesuffix(_PRETOKENIZED) in input_fields_to_include
    return include_all_inputs or name.endswith(_PRETOKENIZED)

  with epath.Path(path).open("w") as file:
    for row, example in enumerate(task_ds.as_numpy_iterator()):
      written: dict[str, Any] = {
        "inputs": {name: _plain(x) for name, x in example.items() if kept(name)}
      }
      if mode == "score":
        written["score"] = _plain(outputs[row])
      else:
        written["prediction"] = _plain(decode_tokens(vocabulary, outputs[row]))
        if output_ids:
          written["prediction_tokens"] = _up_to_padding(_plain(outputs[row]))
      if mode == "predict_with_aux" or (mode == "score" and aux):
        written["aux"] = _row(aux, row)
      file.write(json.dumps(written, cls=encoder) + "\n")


def check_mode(mode: str) -> None:
  """Raises ValueError unless there is such a mode of inference."""
  if mode not in MODES:
    raise ValueError(f"infer.mode = {mode!r} does not exist: set one of {', '.join(MODES)}")


def merge_chunks_to_file(
  output_dir: str, output_fname: str, tmp_dir: str, step: int | None
) -> None:
  """Joins the chunks `tmp_dir/output_fname-chunk00000` and so on (T5X's function).

  Args:
    output_dir: the folder of the merged file.
    output_fname: its name.
    tmp_dir: the folder of the chunks.
    step: the checkpoint's step, for other functions with these arguments.

  Raises:
    ValueError: there is no chunk, or one is missing.
  """
  del step
  length = len("00000")
  chunks = sorted(epath.Path(tmp_dir).glob(f"{output_fname}-chunk{'?' * length}"))
  numbers = [int(chunk.name[-length:]) for chunk in chunks]
  if not chunks or numbers != list(range(len(chunks))):
    raise ValueError(
      f"the chunks of {output_fname} in {tmp_dir} are not complete (there are {numbers}): remove "
      "that folder, and start again"
    )
  with (epath.Path(output_dir) / output_fname).open("wb") as merged:
    for chunk in chunks:
      with chunk.open("rb") as part:
        shutil.copyfileobj(part, merged)


def _row(aux: Mapping[str, Any], row: int) -> Any:
  """Returns what a tree of columns has in one row."""
  return jax.tree.map(
    lambda column: _plain(column[row]), aux, is_leaf=lambda x: isinstance(x, list | np.ndarray)
  )


def _plain(value: Any) -> Any:
  """Returns a value as JSON knows it: text, numbers, lists of them."""
  if isinstance(value, bytes):
    return value.decode("utf-8", errors="backslashreplace")
  if isinstance(value, np.ndarray | np.generic | jax.Array):
    array = np.asarray(value)
    return _plain((array.astype(np.float32) if array.dtype == jnp.bfloat16 else array).tolist())
  if isinstance(value, list | tuple):
    return [_plain(item) for item in value]
  return value


def _up_to_padding(tokens: list[int]) -> list[int]:
  return tokens[: tokens.index(0)] if 0 in tokens else tokens


def check_output_dir(binding: str, folder: str) -> None:
  """Checks that a folder for results is there or can be made; one in a store such as gs:// is taken on trust.

  Raises:
    ValueError: it cannot be written.
  """
  there = pathlib.Path(folder).absolute()
  while not there.exists():
    there = there.parent
  if "://" not in folder and not _can_write(there):
    raise ValueError(
      f"{binding} = {folder!r} cannot be written: {there} is no folder that you may write in; set "
      "another"
    )


def _can_write(folder: pathlib.Path) -> bool:
  """Tries it: what the rights say is not all, as on a full, a foreign or a read-only file system."""
  try:
    with tempfile.TemporaryFile(dir=folder):
      return True
  except OSError:
    return False
