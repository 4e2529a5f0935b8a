"""The verbs of `rosetta-t5` that start runs or show what they read: train, eval, infer, export, check, inspect."""

import argparse
import dataclasses
import functools
import importlib
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rosetta_t5 import terminal
from rosetta_t5.cli import text_commands
from rosetta_t5.config.command_line import add_trust_option
from rosetta_t5.terminal import positive_integer
from rosetta_t5.user_errors import ConfigError

_DATA = ("infer_eval_dataset_cfg", "train_eval_dataset_cfg", "train_dataset_cfg")
_SOURCES = "MODEL_DIR, one of its checkpoints, a Hugging Face folder, or OWNER/NAME on its hub"
_INPUTS = "the column of the inputs, or a template: 'question: {question}'"
_TARGETS = "the column of the targets, or a template"
_LENGTHS = "inputs=512,targets=128"
# Arguments of `DatasetConfig` → the macros of T5X's gin files that set them.
_MACROS = {
  "mixture_or_task_name": "MIXTURE_OR_TASK_NAME",
  "module": "MIXTURE_OR_TASK_MODULE",
  "task_feature_lengths": "TASK_FEATURE_LENGTHS",
}


def train_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 train`."""
  parser.set_defaults(run=functools.partial(_run_main, "train"))


def eval_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 eval`."""
  _add_run_arguments(parser, "MODEL_DIR/eval/SPLIT, or MODEL_DIR/eval/FILE")
  add = parser.add_argument_group("rows of files").add_argument
  add("--file", nargs="+", help="evaluate these files' rows, with the run's columns and metrics")
  add("--inputs", help=_INPUTS)
  add("--targets", help=_TARGETS)
  add("--metrics", nargs="+", help="such as accuracy, bleu, rouge (data.file_task.metrics)")
  parser.set_defaults(run=_eval)


def infer_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 infer`."""
  _add_run_arguments(parser, "MODEL_DIR/infer/SPLIT/checkpoint_STEP")
  add = parser.add_argument_group("the run's task").add_argument
  modes = ("predict", "predict_with_aux", "score")
  add("--mode", choices=modes, help="what to compute: predictions (the default), or scores too")
  text_commands.infer_arguments(parser)
  parser.set_defaults(run=_infer)


def export_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 export`."""
  add = parser.add_argument_group("a trained model").add_argument
  add("--model_dir", help=_SOURCES)
  text_commands.add_adapter_option(add)
  add("--output_dir", help="the folder of the SavedModel, with stablehlo/ in it")
  add("--batch_size", type=positive_integer, help="default: any number of texts")
  text_commands.add_length_options(add)
  add("--num_decodes", type=positive_integer, help="beams or samples; all are returned")
  add_trust_option(parser)
  parser.set_defaults(run=_export)


def check_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 check`."""
  parser.add_argument("files", nargs="*", metavar="FILE", help="a gin file, such as a recipe")
  add_trust_option(parser)
  parser.set_defaults(run=_check)


def inspect_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 inspect`."""
  add = parser.add_argument
  add("data", nargs="+", help="a task, gin files, a MODEL_DIR, prepared data, or a file of rows")
  add("--split", default="train", help="the split of the data (default: train)")
  add("--lengths", type=terminal.feature_lengths, help=f"of features, such as {_LENGTHS}")
  add("--batches", type=positive_integer, default=4, help="batches to read (default: 4)")
  add("--batch-size", type=positive_integer, default=8, help="rows of a batch (default: 8)")
  add("--examples", type=int, default=2, help="examples to show as text (default: 2)")
  add("--pack", action="store_true", help="pack several examples into a row")
  of_file = parser.add_argument_group("a file of rows").add_argument
  of_file("--inputs", help=_INPUTS)
  of_file("--targets", help=_TARGETS)
  of_file("--text", default="text", help="the column of the text, or a template")
  of_file("--vocab", metavar="MODEL", help="a SentencePiece model (default: T5's)")
  add("--module", action="append", default=[], help="a module that registers the task; repeatable")
  add_trust_option(parser)
  parser.set_defaults(run=_inspect)


def _add_run_arguments(parser: argparse.ArgumentParser, output_dir: str) -> None:
  add = parser.add_argument_group("a trained model").add_argument
  add("--model_dir", help=_SOURCES)
  add("--task", help="the task or mixture; default: the one that the run evaluates")
  add("--split", help="its split; default: the one that the run evaluates")
  add("--batch_size", type=positive_integer, help="default: the run's; 8 for texts")
  add("--output_dir", help=f"the folder for the results; default: {output_dir}")
  add_trust_option(parser)


def _eval(options: argparse.Namespace) -> int:
  terminal.tolerate_lost_output()
  if options.model_dir is None:
    of_rows = ("file", "inputs", "targets", "metrics")
    _refuse(options, ("task", "split", "batch_size", "output_dir", *of_rows), "--model_dir")
    return _run_main("eval", options)
  if options.file is None:
    _refuse(options, ("inputs", "targets", "metrics"), "--file")
  else:
    _refuse(options, ("task", "split"), "the run's task, but --file gives rows")
  from rosetta_t5 import data, eval
  from rosetta_t5.trained_model import open_checkpoint, read_run
  from rosetta_t5.training import Trainer

  run, restore_cfg = read_run(options.model_dir, options.flags, options.trust)
  cfg = _dataset_cfg(run, options, _DATA)
  folder = cfg.split
  batches: int | None = None  # all, if there are files
  if options.file is not None:
    like = data.find_task_or_mixture(cfg) if cfg.name else None
    columns = {name: getattr(options, name) for name in ("inputs", "targets", "metrics")}
    given = {name: value for name, value in columns.items() if value is not None}
    folder = data.task_on_rows(options.file, like, run["model"].output_vocabulary, given)
    changes = {"mixture_or_task_name": folder, "split": "validation", "use_cached": False}
    cfg = dataclasses.replace(cfg, module=None, pack=False, **changes)
    # For metrics, the lengths of the rows, as in the run's own evaluation.
    if like is None or not data.has_metrics(cfg):
      lengths = cfg.task_feature_lengths or run["task_feature_lengths"]
      cfg = dataclasses.replace(cfg, task_feature_lengths=lengths)
  output_dir = options.output_dir or _results_folder(restore_cfg, "eval", folder)
  if data.has_metrics(cfg):
    eval.evaluate(
      model=run["model"],
      dataset_cfg=dataclasses.replace(cfg, pack=False),
      restore_checkpoint_cfg=restore_cfg,
      partitioner=run["partitioner"],
      output_dir=output_dir,
      inference_evaluator_cls=run.get("inference_evaluator_cls"),
      summarize_config_fn=lambda **_: None,
    )
    return 0
  if options.file is None:
    cfg, batches = _dataset_cfg(run, options, _DATA[1:]), run.get("eval_steps") or None
  trainer_cls = run.get("trainer_cls") or Trainer
  eval.evaluate_loss(open_checkpoint(run, restore_cfg), cfg, trainer_cls, batches, output_dir)
  return 0


def _infer(options: argparse.Namespace) -> int:
  if options.model_dir is None:
    of_models = ("input", "task", "split", "batch_size", "output_dir", "mode")
    _refuse(options, (*of_models, *text_commands.DECODING_OPTIONS), "--model_dir")
  elif ignored := [flag for flag in options.flags if flag.lstrip("-").startswith("gin.infer.")]:
    raise ConfigError(
      f"{ignored[0]} has no effect with --model_dir: give --mode and the other options of this command"
    )
  if options.input is not None:
    _refuse(options, ("task", "split", "output_dir", "mode"), "a task, but --input gives texts")
    return text_commands.infer(options)
  _refuse(options, text_commands.OPTIONS, "--input")
  if options.model_dir is None:
    return _run_main("infer", options)
  from rosetta_t5.infer import infer
  from rosetta_t5.trained_model import read_run

  used = ("model", "partitioner", *_DATA)
  run, restore_cfg = read_run(options.model_dir, options.flags, options.trust, used)
  cfg = _dataset_cfg(run, options, _DATA)
  lengths = cfg.task_feature_lengths or run["task_feature_lengths"]
  model = run["model"]  # A ModelFile builds another one at each access.
  text_commands.apply_decoding_options(options, model)
  terminal.tolerate_lost_output()
  infer(
    mode=options.mode or "predict",
    model=model,
    dataset_cfg=dataclasses.replace(cfg, pack=False, task_feature_lengths=lengths),
    restore_checkpoint_cfg=restore_cfg,
    partitioner=run["partitioner"],
    output_dir=options.output_dir or _results_folder(restore_cfg, "infer", cfg.split),
    checkpoint_period=100,
    summarize_config_fn=lambda **_: None,
  )
  return 0


def _export(options: argparse.Namespace) -> int:
  if options.model_dir is None:
    names = ("adapter", "output_dir", "batch_size", *text_commands.LENGTHS, "num_decodes")
    _refuse(options, names, "--model_dir")
    return _run_main("export.saved_model", options)
  if options.output_dir is None:
    raise ConfigError("--model_dir needs --output_dir, the folder of the SavedModel")
  from rosetta_t5.export.saved_model import save_model
  from rosetta_t5.trained_model import read_run

  given = (options.model_dir, options.flags, options.trust, ("model", "partitioner"))
  run, restore_cfg = read_run(*given, options.adapter)
  lengths = text_commands.feature_lengths(run["task_feature_lengths"], options)
  more = (options.output_dir, options.batch_size, options.num_decodes)
  save_model(run["model"], restore_cfg, lengths, *more)
  return 0


def _check(options: argparse.Namespace) -> int:
  from rosetta_t5.config import run_from_command_line
  from rosetta_t5.plan.description import describe_run

  files = [f"--gin_file={file}" for file in options.files]
  argv = ["rosetta-t5 check", *files, *options.flags, "--dry_run"]
  run_from_command_line(None, argv, describe_run)
  return 0


def _inspect(options: argparse.Namespace) -> int:
  """Shows a task's data; returns 1 if it has problems, else 0."""
  from rosetta_t5.config.command_line import parse_command_line
  from rosetta_t5.data import DatasetConfig
  from rosetta_t5.data.inspection import show_dataset
  from rosetta_t5.data.tensorflow_import import import_seqio

  if folder := parse_command_line(["rosetta-t5", *options.flags]).tfds_data_dir:
    import_seqio().set_tfds_data_dir_override(folder)
  for module in options.module:
    importlib.import_module(module)
  found = {"task_feature_lengths": terminal.feature_lengths(_LENGTHS), **_find_data(options)}
  if options.lengths:
    found["task_feature_lengths"] = options.lengths
  order = {"shuffle": True, "seed": 0, "pack": options.pack}
  cfg = DatasetConfig(split=options.split, batch_size=options.batch_size, **order, **found)
  return show_dataset(cfg, options.batches, options.examples)


def _find_data(options: argparse.Namespace) -> dict[str, Any]:
  """Returns the arguments of `DatasetConfig` that the command's data determines."""
  from rosetta_t5.config.launch import read_macros
  from rosetta_t5.data import file_task
  from rosetta_t5.data.prepared import prepared_task
  from rosetta_t5.data.prepared.shards import MANIFEST
  from rosetta_t5.data.reading.files import FORMATS
  from rosetta_t5.data.tensorflow_import import import_seqio
  from rosetta_t5.trained_model import read_run

  first, *others = options.data
  if first.endswith(".gin"):
    files = [f"--gin_file={path}" for path in options.data]
    macros = read_macros(["rosetta-t5", *files, *options.flags], list(_MACROS.values()))
    if "MIXTURE_OR_TASK_NAME" not in macros:
      raise ConfigError(f"MIXTURE_OR_TASK_NAME is not set in {', '.join(options.data)}")
    return {name: macros[macro] for name, macro in _MACROS.items() if macros.get(macro)}
  if others:
    raise ConfigError(f"expected one task, folder or data file, got {', '.join(options.data)}")
  if os.path.exists(os.path.join(first, MANIFEST)):
    return {"mixture_or_task_name": prepared_task(first)}
  if any(os.path.exists(os.path.join(first, name)) for name in ("model.json", "config.gin")):
    cfg = read_run(first, options.flags, options.trust)[0]["train_dataset_cfg"]
    return {name: getattr(cfg, name) for name in (*_MACROS, "use_cached")}
  # Files that do not exist are reported by what reads them, with similar names.
  has_suffix = not {*sum(FORMATS.values(), ())}.isdisjoint(pathlib.PurePath(first).suffixes)
  if not (os.path.exists(first) or "*" in first or "/" in first or has_suffix):
    return {"mixture_or_task_name": first}
  how: dict[str, Any] = {"text": options.text}
  if options.inputs or options.targets:
    how = {"objective": "seq2seq", "inputs": options.inputs, "targets": options.targets}
  if options.vocab:
    how["vocabulary"] = import_seqio().SentencePieceVocabulary(options.vocab, extra_ids=100)
  return {"mixture_or_task_name": file_task(first, **how)}


def _run_main(module: str, options: argparse.Namespace) -> int:
  """Runs the `main` of a module, such as `rosetta_t5.train`, with T5X's flags."""
  if not any(flag.lstrip("-").startswith("dry_run") for flag in options.flags):
    terminal.tolerate_lost_output()
  importlib.import_module(f"rosetta_t5.{module}").main(["rosetta-t5", *options.flags])
  return 0


def _refuse(options: argparse.Namespace, names: Sequence[str], needed: str) -> None:
  """Raises ConfigError if one of these options is given: it has no effect without `needed`."""
  given = [f"--{name}" for name in names if getattr(options, name) is not None]
  if given:
    raise ConfigError(f"{given[0]} needs {needed}")


def _results_folder(restore_cfg: Any, verb: str, data: str) -> str:
  """Returns the folder in MODEL_DIR for a checkpoint's results; evaluations of all checkpoints share one."""
  from rosetta_t5.checkpoints import latest_step
  from rosetta_t5.checkpoints.checkpoint_folders import step_of

  path, is_checkpoint = pathlib.Path(restore_cfg.path), restore_cfg.mode == "specific"
  if is_checkpoint and step_of(path) is None:
    raise ConfigError(f"{path} is not in the folder of a run, where results go: give --output_dir")
  folder = (path.parent if is_checkpoint else path) / verb / data
  if verb == "infer":
    folder /= path.name if is_checkpoint else f"checkpoint_{latest_step(path)}"
  return str(folder)


def _dataset_cfg(run: Mapping[str, Any], options: argparse.Namespace, names: Sequence[str]) -> Any:
  """Returns the first data of these names that a run has, with the task, split and batch size of the options."""
  cfg = next(run[name] for name in names if run.get(name) is not None)
  given = {"mixture_or_task_name": options.task, "split": options.split}
  given["batch_size"] = options.batch_size
  if not (cfg.name or options.task or getattr(options, "file", None)):
    raise ConfigError("a Hugging Face folder has no task of its own: give --task, or eval --file")
  cfg = dataclasses.replace(cfg, **{name: x for name, x in given.items() if x is not None})
  if pathlib.PurePath(cfg.split).name != cfg.split:  # it is part of the path of the results
    raise ConfigError(f"the split must be a name, got {cfg.split!r}")
  return cfg
