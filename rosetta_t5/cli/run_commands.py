"""The verbs of `rosetta-t5` that start runs: train, eval, infer and check."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rosetta_t5 import terminal
from rosetta_t5.cli import decoding_options, text_commands
from rosetta_t5.config.command_line import add_trust_option
from rosetta_t5.terminal import positive_integer
from rosetta_t5.user_errors import ConfigError

_DATA = ("infer_eval_dataset_cfg", "train_eval_dataset_cfg", "train_dataset_cfg")
_SOURCES = (
  "MODEL_DIR of a run, one of its checkpoints, a Hugging Face folder, or OWNER/NAME on its hub"
)
MODES = ("predict", "predict_with_aux", "score")


def train_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 train`."""
  parser.set_defaults(run=functools.partial(_run_main, "train"))


def eval_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 eval`."""
  _add_run_arguments(parser, "MODEL_DIR/eval/SPLIT, or MODEL_DIR/eval/FILE")
  add = parser.add_argument_group("rows of files").add_argument
  add(
    "--file", nargs="+", help="evaluate all rows of these files, with the run's columns and metrics"
  )
  add("--inputs", help="the column of the inputs, or a template: 'question: {question}'")
  add("--targets", help="the column of the targets, or a template")
  add("--metrics", nargs="+", help="such as accuracy, bleu, rouge (data.file_task.metrics)")
  parser.set_defaults(run=_eval)


def infer_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 infer`."""
  _add_run_arguments(parser, "MODEL_DIR/infer/SPLIT/checkpoint_STEP")
  add = parser.add_argument_group("the run's task").add_argument
  add("--mode", choices=MODES, help="what to compute: predictions (the default), or scores too")
  text_commands.infer_arguments(parser)
  decoding_options.add_arguments(parser)
  parser.set_defaults(run=_infer)


def export_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `rosetta-t5 export`."""
  add = parser.add_argument_group("a trained model").add_argument
  add("--model_dir", help=_SOURCES)
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


def _add_run_arguments(parser: argparse.ArgumentParser, output_dir: str) -> None:
  add = parser.add_argument_group("a trained model").add_argument
  add("--model_dir", help=_SOURCES)
  add("--task", help="the task or mixture; default: the one that the run evaluates")
  add("--split", help="its split; default: the one that the run evaluates")
  add("--batch_size", type=positive_integer, help="default: the run's; 8 for texts")
  add("--output_dir", help=f"the folder for the results; default: {output_dir}")
  add_trust_option(parser)


def _eval(options: argparse.Namespace) -> int:
  terminal.continue_without_output()
  if options.model_dir is None:
    names = ("task", "split", "batch_size", "output_dir", "file")
    _refuse(options, names, "--model_dir")
    return _run_main("eval", options)
  if options.file is None:
    _refuse(options, ("inputs", "targets", "metrics"), "--file")
  else:
    _refuse(
      options, ("task", "split"), "a run's task, but --file gives rows: leave one of them out"
    )
  from rosetta_t5 import data, eval
  from rosetta_t5.trained_model import open_checkpoint, read_run
  from rosetta_t5.training import Trainer

  run, restore_cfg = read_run(options.model_dir, options.flags, options.trust)
  cfg = _dataset_cfg(run, options, "infer_eval_dataset_cfg", "train_eval_dataset_cfg")
  model_dir, _ = _locate(restore_cfg, options)
  folder = cfg.split
  if options.file is not None:
    like = data.find_task_or_mixture(cfg) if cfg.name else None
    columns = (options.inputs, options.targets, options.metrics)
    folder = data.task_on_rows(options.file, like, run["model"].output_vocabulary, *columns)
    lengths = cfg.task_feature_lengths or run["task_feature_lengths"]
    changes = {"mixture_or_task_name": folder, "split": "validation", "use_cached": False}
    cfg = dataclasses.replace(cfg, task_feature_lengths=lengths, module=None, **changes)
  output_dir = options.output_dir or str(model_dir / "eval" / folder)
  if data.has_metrics(cfg):
    eval.evaluate(
      model=run["model"],
      dataset_cfg=dataclasses.replace(cfg, pack=False),
      restore_checkpoint_cfg=restore_cfg,
      partitioner=run["partitioner"],
      output_dir=output_dir,
      inference_evaluator_cls=run.get("inference_evaluator_cls"),
      summarize_config_fn=_write_no_config,
    )
    return 0
  if options.file is None:
    cfg, batches = _dataset_cfg(run, options, "train_eval_dataset_cfg"), run["eval_steps"]
  else:
    rows = data.find_task_or_mixture(cfg).get_dataset(lengths, split=cfg.split, shuffle=False)
    batches = -(-sum(1 for _ in rows) // cfg.batch_size)
    cfg = dataclasses.replace(cfg, pack=False)
  trainer_cls = run.get("trainer_cls") or Trainer
  eval.evaluate_loss(open_checkpoint(run, restore_cfg), cfg, trainer_cls, batches, output_dir)
  return 0


def _infer(options: argparse.Namespace) -> int:
  if options.model_dir is None:
    of_models = ("input", "task", "split", "batch_size", "output_dir", "mode")
    _refuse(options, (*of_models, *decoding_options.NAMES), "--model_dir")
  elif ignored := [flag for flag in options.flags if flag.lstrip("-").startswith("gin.infer.")]:
    raise ConfigError(
      f"{ignored[0]} has no effect with --model_dir, whose model alone gin configures: give --mode and the "
      "other options of this command, or configure the inference by gin files (--gin_file)"
    )
  if options.input is not None:
    _refuse(
      options,
      ("task", "split", "output_dir", "mode"),
      "a run's task, but --input gives texts: leave one of them out",
    )
    return text_commands.infer(options)
  _refuse(options, text_commands.OPTIONS, "--input")
  if options.model_dir is None:
    return _run_main("infer", options)
  from rosetta_t5.infer import infer
  from rosetta_t5.trained_model import read_run

  used = ("model", "partitioner", *_DATA)
  run, restore_cfg = read_run(options.model_dir, options.flags, options.trust, used)
  cfg = _dataset_cfg(run, options, *_DATA)
  lengths = cfg.task_feature_lengths or run["task_feature_lengths"]
  model_dir, checkpoint = _locate(restore_cfg, options)
  model = run["model"]
  decoding_options.apply(options, model)
  terminal.continue_without_output()
  infer(
    mode=options.mode or "predict",
    model=model,
    dataset_cfg=dataclasses.replace(cfg, pack=False, task_feature_lengths=lengths),
    restore_checkpoint_cfg=restore_cfg,
    partitioner=run["partitioner"],
    output_dir=options.output_dir or str(model_dir / "infer" / cfg.split / checkpoint),
    checkpoint_period=100,
    summarize_config_fn=_write_no_config,
  )
  return 0


def _export(options: argparse.Namespace) -> int:
  if options.model_dir is None:
    names = ("output_dir", "batch_size", *text_commands.LENGTHS, "num_decodes")
    _refuse(options, names, "--model_dir")
    return _run_main("export.saved_model", options, "export")
  if options.output_dir is None:
    raise ConfigError("--model_dir needs --output_dir, the folder of the SavedModel")
  from rosetta_t5.export.saved_model import save_model
  from rosetta_t5.trained_model import read_run

  used = ("model", "partitioner")
  run, restore_cfg = read_run(options.model_dir, options.flags, options.trust, used)
  save_model(
    run["model"],
    restore_cfg,
    text_commands.feature_lengths(run["task_feature_lengths"], options),
    options.output_dir,
    options.batch_size,
    options.num_decodes,
  )
  return 0


def _check(options: argparse.Namespace) -> int:
  from rosetta_t5.config import run_from_command_line
  from rosetta_t5.plan.description import describe_run

  files = (f"--gin_file={file}" for file in options.files)
  argv = ["rosetta-t5 check", *files, *options.flags, "--dry_run"]
  run_from_command_line(None, argv, describe_run)
  return 0


def _run_main(module: str, options: argparse.Namespace, verb: str | None = None) -> int:
  """Runs the `main` of a module, such as `rosetta_t5.train`, with T5X's flags."""
  is_dry = any(flag.lstrip("-").startswith("dry_run") for flag in options.flags)
  if not is_dry:
    terminal.continue_without_output()
  program = f"rosetta-t5 {verb or module}"
  importlib.import_module(f"rosetta_t5.{module}").main([program, *options.flags])
  return 0


def _write_no_config(**_: Any) -> None:
  """Writes nothing: the configuration is the run's, which is in its folder."""


def _refuse(options: argparse.Namespace, names: Sequence[str], needed: str) -> None:
  """Raises ConfigError if one of these options is given: it has no effect without `needed`."""
  given = [f"--{name}" for name in names if getattr(options, name) is not None]
  if given:
    raise ConfigError(f"{given[0]} needs {needed}")


def _locate(restore_cfg: Any, options: argparse.Namespace) -> tuple[pathlib.Path, str]:
  """Returns the MODEL_DIR of a checkpoint, and the checkpoint's name in it."""
  from rosetta_t5.checkpoints import is_hugging_face, latest_step

  path = pathlib.Path(restore_cfg.path)
  if is_hugging_face(path) and options.output_dir is None:
    raise ConfigError(f"results are not written into {path}: give --output_dir")
  if restore_cfg.mode == "specific":
    return path.parent, path.name
  return path, f"checkpoint_{latest_step(path)}"


def _dataset_cfg(run: Mapping[str, Any], options: argparse.Namespace, *names: str) -> Any:
  """Returns the first data that a run has, with the task, split and batch size of the options.

  Args:
    *names: the names of these arguments, in order of preference; the training data come last.
  """
  found = [run[name] for name in (*names, "train_dataset_cfg") if run.get(name) is not None]
  given = {
    "mixture_or_task_name": options.task,
    "split": options.split,
    "batch_size": options.batch_size,
  }
  changes = {name: value for name, value in given.items() if value is not None}
  if not (found[0].name or options.task or getattr(options, "file", None)):
    raise ConfigError("a Hugging Face folder has no task of its own: give --task, or eval --file")
  cfg = dataclasses.replace(found[0], **changes)
  if pathlib.PurePath(cfg.split).name != cfg.split:  # it is part of the path of the results
    raise ConfigError(f"the split must be a name, got {cfg.split!r}")
  return cfg
