"""Where a run starts from, whether that fits, and what it saves."""

from __future__ import annotations

from typing import Any

from rosetta_t5 import checkpoints
from rosetta_t5.checkpoints.reading import check_fits

Rows = list[tuple[str, str]]


def rows(plan: Any) -> Rows:
  """Returns what a run starts from and what it saves; compares a checkpoint's names and shapes.

  Raises:
    ValueError: there is no such checkpoint, or it is of another model.
  """
  if plan["checkpoint_cfg"] is not None and plan["model_dir"]:
    cfg, path = checkpoints.find_start(plan["checkpoint_cfg"], plan["model_dir"])
    found = [("starts from", path or "scratch")]
    return [*found, ("saves", _saves(plan)), *_checked(plan, cfg, [path] if path else [])]
  given = plan["restore_checkpoint_cfg"]
  if given is None:
    return []
  cfgs = given if isinstance(given, list | tuple) else [given]
  cfg, paths = checkpoints.get_first_valid_restore_config_and_paths(cfgs)
  if not paths:
    tried = ", ".join(str(c.path) for c in cfgs)
    raise ValueError(f"there is no checkpoint to restore in {tried}: set CHECKPOINT_PATH")
  text = paths[0] if len(paths) == 1 else f"{len(paths)} checkpoints: {paths[0]} …"
  return [("restores", text), ("writes", str(plan["output_dir"])), *_checked(plan, cfg, paths)]


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


def _checked(plan: Any, cfg: Any, paths: list[str] | tuple[str, ...]) -> Rows:
  """Compares each checkpoint with the run's train state, as restoring it would."""
  if cfg is None or plan["model"] is None:
    return []
  if cfg.assignment_map or cfg.state_transformation_fns:
    return []  # names are changed on the way
  expected = plan.state.state_dict()
  for path in paths:
    check_fits(
      path,
      expected,
      allow_missing=cfg.fallback_to_scratch,
      allow_unexpected=not cfg.strict,
    )
  return []
