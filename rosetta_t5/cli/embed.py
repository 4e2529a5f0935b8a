"""`rosetta-t5 embed`, which writes the vectors that a model's encoder computes of texts."""

import argparse
import dataclasses
import io
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rosetta_t5 import terminal
from rosetta_t5.cli import text_commands
from rosetta_t5.config.command_line import add_trust_option
from rosetta_t5.files import write_atomically
from rosetta_t5.terminal import output_file, positive_integer
from rosetta_t5.user_errors import ConfigError

_SUFFIXES = (".npy", ".parquet")
_COLUMN = "embedding"
# Texts of similar lengths are in one batch; this many batches are prepared together.
_BATCHES = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 embed`."""
  add = parser.add_argument
  add("--model_dir", required=True, help="a run, or a folder; one with an encoder alone works too")
  add("--input", required=True, help="lines of text, or rows of a file with columns; - for stdin")
  add("--template", help="makes a text of a row's columns: a column, or '{title}: {text}'")
  text = "a new file: .npy, or .parquet with the rows"
  add("--output", type=output_file, required=True, help=text)
  text = (
    "how the encoder's outputs become a vector: their mean, the first one, or none for a vector of each token, the "
    "end token last. By default, what a folder of sentence-transformers says (pooling, projection, "
    "normalization), and the mean elsewhere"
  )
  add("--pooling", choices=("mean", "first", "none"), help=text)
  text_commands.add_adapter_option(add)
  add("--batch_size", type=positive_integer, default=32, help="texts in a batch (default: 32)")
  add("--input_length", type=positive_integer, help="tokens; the model's by default")
  add_trust_option(parser)
  parser.set_defaults(run=_embed, targets=None, output_length=None)


def _embed(options: argparse.Namespace) -> int:
  """Reads all texts, and writes their vectors in the same order once all are computed."""
  from rosetta_t5.checkpoints.formats.hugging_face.sentence_modules import read_sentence_modules

  if not options.output.endswith(_SUFFIXES):
    raise ConfigError(f"--output must end with {' or '.join(_SUFFIXES)}, got {options.output}")
  if options.pooling == "none" and options.output.endswith(".npy"):
    raise ConfigError("--pooling none writes lists of vectors: --output must end with .parquet")
  if os.path.exists(options.output):
    raise ConfigError(f"--output {options.output} exists: give another name, or remove the file")
  rows = list(text_commands.read_rows(options))
  if text_commands.has_conversations(options):
    raise ConfigError(f"The rows of {options.input} {text_commands.NEEDS_TEMPLATE}")
  if not rows:
    raise text_commands.no_text_error(options.input)
  columns = _columns([row.inputs for row in rows])
  model = _open_encoder(options)
  folder = read_sentence_modules(options.model_dir) if options.pooling is None else None
  lengths = text_commands.feature_lengths(model.lengths, options)
  if folder is not None and folder.max_length and options.input_length is None:
    lengths["inputs"] = folder.max_length
  pooling = folder.pooling if folder else options.pooling or "mean"
  texts = [row.example["input"] if row.example else "" for row in rows]
  computed = _compute(model, texts, lengths, options.batch_size, pooling)
  found = dict(terminal.track(computed, "embedding", len(texts), "texts", stream=sys.stderr))
  vectors = [np.atleast_2d(found[index]) for index in range(len(texts))]  # of each text
  vectors_ND = np.concatenate(vectors)
  for step in folder.steps if folder else ():
    vectors_ND = step(vectors_ND)
  counts = [len(of_text) for of_text in vectors] if options.pooling == "none" else None
  _write(options.output, columns, vectors_ND, counts)
  print(f"{options.output}: {len(vectors_ND)} vectors of {vectors_ND.shape[1]} numbers")
  return 0


def _open_encoder(options: argparse.Namespace) -> Any:
  """Returns an `OpenedModel` with the encoder of the model, whose decoder is not read.

  Raises:
    ConfigError: the model has no encoder.
  """
  from rosetta_t5.checkpoints import local_folder
  from rosetta_t5.models import EncoderDecoderModel, EncoderModel
  from rosetta_t5.trained_model import open_checkpoint, read_run

  options.model_dir = local_folder(options.model_dir)
  given = (options.model_dir, options.flags, options.trust, ("model", "partitioner"))
  run, restore_cfg = read_run(*given, options.adapter)
  if not isinstance(model := run["model"], EncoderDecoderModel):
    raise ConfigError(f"--model_dir {options.model_dir} has no encoder: give an encoder-decoder")
  encoder = EncoderModel(model.module, model.input_vocabulary, model.output_vocabulary, None)
  transformations = (*restore_cfg.state_transformation_fns, _without_decoder)
  restore_cfg = dataclasses.replace(restore_cfg, state_transformation_fns=transformations)
  return open_checkpoint({**run, "model": encoder}, restore_cfg)


def _without_decoder(state: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a checkpoint's state dict with the parts of the network that the expected one has."""
  kept = {name: x for name, x in state["target"].items() if name in expected["target"]}
  return {**state, "target": kept}


def _compute(
  model: Any, texts: Sequence[str], lengths: Mapping[str, int], batch_size: int, pooling: str
) -> Iterator[tuple[int, np.ndarray]]:
  """Yields (index of a text, its vector), the shortest texts first, and prints notes at the end."""
  from rosetta_t5.data.pipeline.inference_data import default_preprocessors
  from rosetta_t5.inference.text_inference import InferenceType, TextInference

  size = batch_size + -batch_size % model.partitioner.data_mesh_size
  inference = TextInference(model.model, model.partitioner, model.state_axes, size, lengths)
  order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
  call, truncated = (default_preprocessors(), model.state), Counter[str]()
  for start in range(0, len(order), size * _BATCHES):
    indices = order[start : start + size * _BATCHES]
    examples = [{"input": texts[index], "target": ""} for index in indices]
    truncated += inference.count_truncated(examples)
    results, _ = inference.infer(InferenceType.EMBED, examples, *call, pooling=pooling)
    for index, (_, vectors) in zip(indices, results, strict=True):
      found = np.asarray(vectors, np.float32)
      yield index, found[found.any(axis=-1)] if pooling == "none" else found
  for note in text_commands.notes_on_truncated(truncated, lengths):
    print(f"note: {note}", file=sys.stderr)


def _columns(inputs: Sequence[str | Mapping[str, Any]]) -> dict[str, list[Any]]:
  """Returns the columns of the rows; texts are one column.

  Raises:
    ConfigError: a column has the name of that for the vectors.
  """
  records = [{"text": x} if isinstance(x, str) else x for x in inputs]
  names = dict.fromkeys(name for record in records for name in record)
  if _COLUMN in names:
    raise ConfigError(f"the input has a column {_COLUMN!r}, where the vectors go: rename it")
  return {name: [record.get(name) for record in records] for name in names}


def _write(
  path: str, columns: Mapping[str, list[Any]], vectors_ND: np.ndarray, counts: Sequence[int] | None
) -> None:
  """Writes the vectors, in a Parquet file beside the columns: one per row, or `counts` of them."""
  buffer = io.BytesIO()
  if path.endswith(".npy"):
    np.save(buffer, vectors_ND)
  else:
    import pyarrow as pa
    import pyarrow.parquet as pq

    width = vectors_ND.shape[1]
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(vectors_ND.reshape(-1)), width)
    if counts is not None:
      vectors = pa.ListArray.from_arrays(np.cumsum([0, *counts], dtype=np.int32), vectors)
    pq.write_table(pa.table({**columns, _COLUMN: vectors}), buffer)
  write_atomically(path, buffer.getvalue())
