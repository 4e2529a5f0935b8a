"""Where a run starts from, whether that fits, and what it saves."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rosetta_t5 import checkpoints
from rosetta_t5.config.language.statements import Macro

Rows = list[tuple[str, str]]


def rows(plan: Any) -> Rows:
  """Returns what a run starts from and what it saves; compares a checkpoint's names and shapes.

  Raises:
    ValueError: there is no such checkpoint, or it is of another model.
  """
  with _with_the_line(plan):
    if plan["checkpoint_cfg"] is not None and plan["model_dir"]:
      return [*_training_start(plan), ("saves", _saves(plan))]
    given = plan["restore_checkpoint_cfg"]
    if given is None:
      return []
    cfgs = given if isinstance(given, list | tuple) else [given]
    return [*_restored(plan, cfgs), ("writes", str(plan["output_dir"]))]


@contextmanager
def _with_the_line(plan: Any) -> Iterator[None]:
  """Adds the line that gives a checkpoint's path to what is wrong with it."""
  try:
    yield
  except checkpoints.CheckpointMismatchError:
    raise  # it may be MODEL_DIR's own, and the model's lines are to change
  except ValueError as error:
    in_force = plan.resolved.program.effective_bindings()
    paths = (b for key, b in in_force.items() if key[1:] == ("RestoreCheckpointConfig", "path"))
    found = next(paths, None)
    while found and isinstance(found.value, Macro):
      found = in_force.get((found.value.name,))
    raise ValueError(f"{error}\n  {found.source}" if found else str(error)) from error


def _training_start(plan: Any) -> Rows:
  """MODEL_DIR's checkpoint, else the one that is given: which then must be there."""
  cfg, folder = plan["checkpoint_cfg"], plan["model_dir"]
  own = dataclasses.replace(cfg, restore=None)
  found, path = (
    (None, None) if _is_remote(folder) else checkpoints.find_start_checkpoint(own, folder)
  )
  if path is None and cfg.restore is not None:
    if any(map(_is_remote, _paths(cfg.restore))):
      return _not_looked_at([cfg.restore])
    found, path = checkpoints.find_start_checkpoint(cfg, folder)
  _check(plan, found, [path] if path else [])
  return [("starts from", path or "scratch")]


def _restored(plan: Any, cfgs: Sequence[Any]) -> Rows:
  if any(_is_remote(path) for cfg in cfgs for path in _paths(cfg)):
    return _not_looked_at(cfgs)
  cfg, paths = checkpoints.get_first_valid_restore_config_and_paths(cfgs)
  if not paths:
    tried = ", ".join(path for cfg in cfgs for path in _paths(cfg))
    raise ValueError(f"there is no checkpoint to restore in {tried}: set CHECKPOINT_PATH")
  _check(plan, cfg, paths)
  return [("restores", paths[0] if len(paths) == 1 else f"{len(paths)} checkpoints: {paths[0]} …")]


def _not_looked_at(cfgs: Sequence[Any]) -> Rows:
  paths = ", ".join(path for cfg in cfgs for path in _paths(cfg))
  return [("starts from", f"{paths} (not looked at: it is not on this machine)")]


def _paths(cfg: Any) -> list[str]:
  given = [cfg.path] if isinstance(cfg.path, str | os.PathLike) else list(cfg.path or ())
  return [os.fspath(path) for path in given if os.fspath(path)]


def _is_remote(path: str | os.PathLike[str]) -> bool:
  return "://" in os.fspath(path)


def _saves(plan: Any) -> str:
  save = plan["checkpoint_cfg"].save
  if save is None:
    return "no checkpoints"
  times = [f"every {save.period} steps"] if save.period else []
  times += [f"at {', '.join(map(str, save.checkpoint_steps))}"] if save.checkpoint_steps else []
  kept = f"the last {save.keep} kept" if save.keep else "all kept"
  parts = [f"checkpoints {' and '.join([*times, 'at start and end'])}", kept, save.dtype]
  parts += ["with the data's position"] if save.save_dataset else []
  return f"{', '.join(parts)}, in {plan['model_dir']}"


def _check(plan: Any, cfg: Any, paths: Sequence[str]) -> None:
  """Compares each checkpoint with the run's train state, as restoring it would."""
  if cfg is None or plan["model"] is None:
    return
  expected = plan.state.state_dict()
  for path in paths:
    checkpoints.check_compatibility(path, expected, cfg)
