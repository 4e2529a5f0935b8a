"""Describes what a run reads and saves: datasets, vocabulary, checkpoints. Reads only the first examples."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from rosetta_t5 import checkpoints
from rosetta_t5.config.configuration import Rows
from rosetta_t5.config.language.statements import Macro
from rosetta_t5.data import check_examples, dataset_config, get_dataset
from rosetta_t5.data.local_copies import local_path
from rosetta_t5.data.prepared import PreparedTask
from rosetta_t5.data.vocabularies.task_vocabularies import get_vocabulary
from rosetta_t5.user_errors import reason_of

# The arguments of runs that are datasets, and what a run does with each.
_DATASETS = {
  "train_dataset_cfg": "trains on",
  "train_eval_dataset_cfg": "loss on",
  "infer_eval_dataset_cfg": "predicts",
  "dataset_cfg": "reads",
}


def data_rows(plan: Any) -> Rows:
  """Returns a row for each dataset of a run.

  Raises:
    ValueError: a module, a task, its split, cache or files, or a vocabulary's file does not exist; or
      the lengths or the vocabulary do not fit the model.
  """
  datasets = {use: plan[argument] for argument, use in _DATASETS.items() if plan[argument]}
  rows = [(use, _dataset_text(cfg)) for use, cfg in datasets.items()]
  unchecked = len(plan.resolved.unchecked)
  for cfg in datasets.values():
    _check_dataset(plan, cfg)
  is_here = len(plan.resolved.unchecked) == unchecked
  training = plan["train_dataset_cfg"]
  return [*rows, *(_example_rows(plan, training) if training and is_here else [])]


def checkpoint_rows(plan: Any) -> Rows:
  """Returns the checkpoints from which a run starts, and those that it saves.

  Raises:
    ValueError: a checkpoint does not exist, or its names or shapes are not those of the run's model.
  """
  try:
    if plan["checkpoint_cfg"] is not None and plan["model_dir"]:
      return [*_training_start(plan), ("saves", _saves(plan))]
    given = plan["restore_checkpoint_cfg"]
    if given is None:
      return []
    cfgs = given if isinstance(given, list | tuple) else [given]
    return [*_restored(plan, cfgs), ("writes", str(plan["output_dir"]))]
  except checkpoints.CheckpointMismatchError:
    raise  # the lines to change are those of the model, and the checkpoint may be in MODEL_DIR
  except ValueError as error:
    raise ValueError(f"{error}{_source_of_path(plan)}") from error


def _dataset_text(cfg: Any) -> str:
  lengths = ", ".join(f"{name} {n}" for name, n in (cfg.task_feature_lengths or {}).items())
  parts = [
    f"{cfg.name}[{cfg.split}]",
    lengths or "as long as the longest example",
    f"batches of {cfg.batch_size}",
    *(["packed"] if cfg.pack else []),
    *(["from its cache"] if cfg.use_cached else []),
  ]
  return ", ".join(parts)


def _check_dataset(plan: Any, cfg: Any) -> None:
  """Checks all of a dataset that can be checked without reading an example."""
  provider = dataset_config.find_task_or_mixture(cfg)
  if isinstance(provider, PreparedTask):
    provider.batch_sequence(cfg, 0, 1, 0)
  else:
    _check_files(plan, cfg, provider)
    if plan["model"] is not None and cfg.task_feature_lengths is not None:
      dataset_config.check_feature_lengths(cfg, plan["model"].FEATURE_CONVERTER_CLS(pack=cfg.pack))
  verify = plan["verify_matching_vocabs_fn"]
  if verify is not None and plan["model"] is not None and _has_vocabulary_files(plan, cfg):
    verify(cfg, plan["model"])


def _example_rows(plan: Any, cfg: Any) -> Rows:
  """Describes the first examples of the training data, if its sources only read files.

  Raises:
    ValueError: they cannot be read, or most targets would lose their end.
  """
  provider = dataset_config.find_task_or_mixture(cfg)
  tasks = dataset_config.subtasks_with_split(cfg, provider)
  if not all(_lists_only(task.source) for task in tasks):
    return []
  steps = plan["relative_steps"] or plan["total_steps"]
  lines = check_examples(cfg, plan["get_dataset_fn"] or get_dataset)(steps)
  return [("" if number else "examples", line) for number, line in enumerate(lines)]


def _check_files(plan: Any, cfg: Any, provider: Any) -> None:
  """Raises ValueError if the split or its files do not exist. Caches have splits of their own."""
  if cfg.use_cached:
    dataset_config.check_split(cfg, provider)
    return
  try:
    _ = provider.splits
    sources = {task.name: task.source for task in dataset_config.subtasks_with_split(cfg, provider)}
    # A user's source may write its files when they are first listed, and a check writes nothing.
    unknown = [name for name, source in sources.items() if not _lists_only(source)]
    files = {n: s.list_shards(cfg.split) for n, s in sources.items() if n not in unknown}
    reason = "its source may write files when they are listed"
  except Exception as error:  # the data is not on this machine, and may be where the run will be
    unknown, files, reason = [cfg.name], {}, reason_of(error)
  plan.resolved.unchecked += [f"the data of the task '{name}' ({reason})" for name in unknown]
  if not unknown:
    dataset_config.check_split(cfg, provider)
  for name, found in files.items():
    if not found:
      raise ValueError(f"no file matches the patterns of the split '{cfg.split}' of '{name}'")


def _lists_only(source: Any) -> bool:
  """Returns whether a source's class is SeqIO's or ours, and so lists its files without writing any."""
  return type(source).__module__.startswith(
    ("seqio.", "rosetta_t5.data.tasks.catalogue", "rosetta_t5.data.reading")
  )


def _has_vocabulary_files(plan: Any, cfg: Any) -> bool:
  """Returns whether the SentencePiece models of a task and its model are on this machine.

  Raises:
    ValueError: a path is not remote, and there is no such file.
  """
  model = plan["model"]
  for vocabulary in (*get_vocabulary(cfg), model.input_vocabulary, model.output_vocabulary):
    path = getattr(vocabulary, "sentencepiece_model_file", "")
    try:
      if not path or not _is_remote(local_path(path)):
        continue
    except ValueError:
      if not _is_remote(path):
        raise
    plan.resolved.unchecked.append(f"the vocabulary {path} (it is not on this machine)")
    return False
  return True


def _source_of_path(plan: Any) -> str:
  """Returns the line that sets the checkpoint's path, for the end of a message; "" if there is none."""
  bindings = plan.resolved.program.effective_bindings()
  paths = (b for key, b in bindings.items() if key[1:] == ("RestoreCheckpointConfig", "path"))
  found = next(paths, None)
  while found and isinstance(found.value, Macro):
    found = bindings.get((found.value.name,))
  return f"\n  {found.source}" if found and found.value else ""


def find_start(plan: Any) -> tuple[Any, str | None]:
  """Returns what a training run restores: MODEL_DIR's checkpoint, else the given one, else (None, None).

  A checkpoint elsewhere than on this machine, which cannot be looked for, is returned without a config.
  """
  cfg, folder = plan["checkpoint_cfg"], plan["model_dir"]
  if cfg is None or not folder:
    return None, None
  given = cfg.restore.paths() if cfg.restore else []
  is_remote = any(map(_is_remote, given))
  found, path = checkpoints.find_start_checkpoint(
    dataclasses.replace(cfg, restore=None) if is_remote else cfg,
    "not made" if _is_remote(folder) else folder,
    None if plan["relative_steps"] else plan["total_steps"],
  )
  return (None, ", ".join(given)) if is_remote and path is None else (found, path)


def _training_start(plan: Any) -> Rows:
  found, path = find_start(plan)
  if path and found is None:
    return _unchecked(plan, [path])
  _check(plan, found, [path] if path else [])
  return [("starts from", path or "scratch")]


def _restored(plan: Any, cfgs: Sequence[Any]) -> Rows:
  """Returns the checkpoints that an evaluation, inference or export restores."""
  given = [path for cfg in cfgs for path in cfg.paths()]
  if any(map(_is_remote, given)):
    return _unchecked(plan, given)
  cfg, paths = checkpoints.find_checkpoints(cfgs)
  _check(plan, cfg, paths)
  return [("restores", paths[0] if len(paths) == 1 else f"{len(paths)} checkpoints: {paths[0]} …")]


def _unchecked(plan: Any, paths: Sequence[str]) -> Rows:
  text = ", ".join(paths)
  plan.resolved.unchecked.append(f"the checkpoint {text} (it is not on this machine)")
  return [("starts from", text)]


def _is_remote(path: str | os.PathLike[str]) -> bool:
  return "://" in os.fspath(path)


def _saves(plan: Any) -> str:
  if (save := plan["checkpoint_cfg"].save) is None:
    return "no checkpoints"
  kept = f"the last {save.keep} kept" if save.keep else "all kept"
  return f"checkpoints {save.times()}, {kept}, {save.dtype}, in {plan['model_dir']}"


def _check(plan: Any, cfg: Any, paths: Sequence[str]) -> None:
  """Compares each checkpoint with the run's train state, as a restore would."""
  if cfg is None or plan["model"] is None:
    return
  expected = plan.state.state_dict()
  checkpoints.check_model(plan["model"], {}, cfg)
  for path in paths:
    checkpoints.find_matching_arrays(
      path,
      expected,
      transformations=cfg.state_transformation_fns,
      allow_missing=cfg.fallback_to_scratch,
      allow_unexpected=not cfg.strict,
    )
