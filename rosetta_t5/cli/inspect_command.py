"""`rosetta-t5 inspect`: finds the data that is named in one of several ways, and shows it."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
from typing import Any

from rosetta_t5.config.command_line import add_trust_option
from rosetta_t5.terminal import feature_lengths, positive_integer
from rosetta_t5.user_errors import ConfigError

_LENGTHS = "inputs=512,targets=128"
_MACROS = ("MIXTURE_OR_TASK_NAME", "MIXTURE_OR_TASK_MODULE", "TASK_FEATURE_LENGTHS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 inspect`."""
  add = parser.add_argument
  add(
    "data",
    nargs="+",
    help="a task or mixture; gin files; the MODEL_DIR of a run; a folder of prepared data; or a file of "
    "text, jsonl, csv, tsv, parquet or arrow",
  )
  add("--split", default="train", help="the split of the data (default: train)")
  add(
    "--lengths",
    type=feature_lengths,
    help=f"tokens of each feature (default: those of the run or the gin files, or {_LENGTHS})",
  )
  add("--batches", type=positive_integer, default=4, help="batches to read (default: 4)")
  add("--batch-size", type=positive_integer, default=8, help="rows of a batch (default: 8)")
  add("--examples", type=int, default=2, help="examples to show as text (default: 2)")
  add("--pack", action="store_true", help="pack several examples into a row")
  add("--seed", type=int, default=0, help="the seed of the order (default: 0)")
  of_file = parser.add_argument_group("a file of rows").add_argument
  of_file("--inputs", help="the column of the inputs, or a template: 'question: {question}'")
  of_file("--targets", help="the column of the targets, or a template")
  of_file("--text", help="the column of the text, or a template, for span corruption")
  of_file("--vocab", metavar="MODEL", help="a SentencePiece model (default: T5's)")
  add("--module", action="append", help="a module that registers the task; repeatable")
  add_trust_option(parser)
  parser.set_defaults(run=inspect)


def inspect(options: argparse.Namespace) -> int:
  """Shows a task's data; returns 1 if it has problems, else 0."""
  from rosetta_t5.config.command_line import parse_command_line
  from rosetta_t5.data import DatasetConfig
  from rosetta_t5.data.inspection import show_dataset
  from rosetta_t5.data.tensorflow_import import import_seqio

  seqio = import_seqio()
  if folder := parse_command_line(["rosetta-t5", *options.flags]).tfds_data_dir:
    seqio.set_tfds_data_dir_override(folder)
  for module in options.module or ():
    importlib.import_module(module)
  lengths = feature_lengths(_LENGTHS)
  cfg = DatasetConfig(
    "", lengths, options.split, options.batch_size, shuffle=True, seed=options.seed
  )
  cfg = dataclasses.replace(cfg, **_find_data(options))
  changes: dict[str, Any] = {"pack": options.pack}
  if options.lengths:
    changes["task_feature_lengths"] = options.lengths
  return show_dataset(dataclasses.replace(cfg, **changes), options.batches, options.examples)


def _find_data(options: argparse.Namespace) -> dict[str, Any]:
  """Returns the arguments of `DatasetConfig` that the command's data determines."""
  from rosetta_t5.data.prepared import prepared_task
  from rosetta_t5.data.prepared.prepare import MANIFEST

  first, *others = options.data
  if first.endswith(".gin"):
    return _of_gin_files(options)
  if others:
    raise ConfigError(f"expected one task, folder or data file, got {', '.join(options.data)}")
  if os.path.exists(os.path.join(first, MANIFEST)):
    return {"mixture_or_task_name": prepared_task(first)}
  if any(os.path.exists(os.path.join(first, name)) for name in ("model.json", "config.gin")):
    from rosetta_t5.trained_model import read_run

    run, _ = read_run(first, options.flags, options.trust)
    cfg = run["train_dataset_cfg"]
    names = ("mixture_or_task_name", "task_feature_lengths", "module", "use_cached")
    return {name: getattr(cfg, name) for name in names}
  if os.path.exists(first):
    return {"mixture_or_task_name": _file_task(first, options)}
  return {"mixture_or_task_name": first}


def _of_gin_files(options: argparse.Namespace) -> dict[str, Any]:
  from rosetta_t5.config.launch import read_macros

  files = [f"--gin_file={path}" for path in options.data]
  found = read_macros(["rosetta-t5", *files, *options.flags], _MACROS)
  if "MIXTURE_OR_TASK_NAME" not in found:
    raise ConfigError(f"MIXTURE_OR_TASK_NAME is not set in {', '.join(options.data)}")
  arguments = {"mixture_or_task_name": found["MIXTURE_OR_TASK_NAME"]}
  if lengths := found.get("TASK_FEATURE_LENGTHS"):
    arguments["task_feature_lengths"] = lengths
  if module := found.get("MIXTURE_OR_TASK_MODULE"):
    arguments["module"] = module
  return arguments


def _file_task(path: str, options: argparse.Namespace) -> str:
  """Registers a task that reads a file, with the columns of the options or those with usual names."""
  from rosetta_t5.data import file_task
  from rosetta_t5.data.reading import BadExample, find_files, read_records
  from rosetta_t5.data.tensorflow_import import import_seqio

  records = (record for _, record in read_records(find_files(path)[0]))
  columns = list(next((r for r in records if not isinstance(r, BadExample)), {}))
  inputs, targets, text = options.inputs, options.targets, options.text
  if not (inputs or targets or text):
    inputs, targets = (
      name if {"inputs", "targets"} <= {*columns} else None for name in ("inputs", "targets")
    )
    text = "text" if "text" in columns else None
  if not (text or (inputs and targets)):
    raise ConfigError(
      f"{path} has the columns {', '.join(map(repr, columns))}: name those to read with --inputs and "
      "--targets (a column, or a template such as 'question: {question}'), or with --text"
    )
  vocabulary = None
  if options.vocab:
    vocabulary = import_seqio().SentencePieceVocabulary(options.vocab, extra_ids=100)
  if inputs and targets:
    return file_task(
      path, vocabulary=vocabulary, objective="seq2seq", inputs=inputs, targets=targets
    )
  return file_task(path, vocabulary=vocabulary, text=text)
