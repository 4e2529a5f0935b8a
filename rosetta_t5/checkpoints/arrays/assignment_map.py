"""Renaming of a checkpoint's parameters to the model's names, by pairs of regular expressions."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rosetta_t5.checkpoints.arrays.state_dicts import flatten_state_dict, unflatten_state_dict

AssignmentMap = Sequence[tuple[str, str | None]]

_log = logging.getLogger(__name__)


def apply_assignment_map(
  ckpt_optimizer_state: Mapping[str, Any],
  optimizer_state: Mapping[str, Any],
  assignment_map: AssignmentMap,
  require_all_rules_match: bool = True,
  *,
  is_resuming: bool = False,
) -> dict[str, Any]:
  """Returns a checkpoint's state dict under the model's names (T5X's function and rules).

  For each name of the model, the first pattern that matches the whole name applies. The name gets
  the checkpoint's value that the replacement names (\\1 is the first group), or no value if the
  replacement is None. The other names of the model, and the checkpoint's values that are not used,
  are left as they are.

  Args:
    ckpt_optimizer_state: the checkpoint's nested state dict.
    optimizer_state: the model's nested state dict.
    assignment_map: pairs of a pattern for the model's names and a replacement or None.
    require_all_rules_match: raise an error for a pattern that matches no name.
    is_resuming: whether the checkpoint is the run's own, whose names need no renaming.

  Raises:
    ValueError: a replacement names a value that the checkpoint lacks, or a pattern matches no name.
  """
  if is_resuming:
    return dict(ckpt_optimizer_state)
  stored = flatten_state_dict(ckpt_optimizer_state)
  names = list(flatten_state_dict(optimizer_state))
  sources, unused = _find_sources(names, assignment_map, stored)
  if require_all_rules_match and unused:
    raise ValueError(_unused_rules_text(unused, names))
  moved = {name: stored[source] for name, source in sources.items() if source is not None}
  for name in moved:
    _log.info("assignment_map: %s takes the value of %s", name, sources[name])
  removed = set(sources.values()) | {name for name, source in sources.items() if source is None}
  kept = {name: leaf for name, leaf in stored.items() if name not in removed}
  # A name of the model that no rule matches keeps its value, even if another name uses it as well.
  unmatched = {name: stored[name] for name in names if name in stored and name not in sources}
  return unflatten_state_dict({**kept, **unmatched, **moved})


def _find_sources(
  names: Sequence[str], assignment_map: AssignmentMap, stored: Mapping[str, Any]
) -> tuple[dict[str, str | None], list[tuple[str, str | None]]]:
  """Returns {name: the stored name that a rule assigns to it, or None}, and the unused rules."""
  sources: dict[str, str | None] = {}
  unused = []
  for rule in assignment_map:
    pattern, replacement = rule
    remaining = [name for name in names if name not in sources]
    try:
      matches = list(filter(None, (re.fullmatch(pattern, name) for name in remaining)))
      expanded = [None if replacement is None else match.expand(replacement) for match in matches]
    except re.error as error:
      raise ValueError(
        f"RestoreCheckpointConfig.assignment_map: the rule {rule!r} is wrong: {error}"
      ) from None
    for match, source in zip(matches, expanded, strict=True):
      name = match.string
      if source is not None and source not in stored:
        raise ValueError(_missing_source_text(name, source, rule, stored))
      sources[name] = source
    if not matches:
      unused.append(rule)
  return sources, unused


def _missing_source_text(name: str, source: str, rule: Any, stored: Mapping[str, Any]) -> str:
  near = difflib.get_close_matches(source, stored, n=3)
  hint = f"similar names in it: {', '.join(near)}" if near else f"it has {len(stored)} others"
  return (
    f"RestoreCheckpointConfig.assignment_map: the rule {rule!r} assigns {source!r} to {name!r}, but "
    f"the checkpoint has no {source!r}; {hint}. Correct the replacement, or set it to None and set "
    "fallback_to_scratch = True"
  )


def _unused_rules_text(unused: Sequence[Any], names: Sequence[str]) -> str:
  near = difflib.get_close_matches(str(unused[0][0]), names, n=3, cutoff=0.4)
  hint = f"; names similar to the first: {', '.join(near)}" if near else ""
  return (
    f"RestoreCheckpointConfig.assignment_map: Unused patterns {[pattern for pattern, _ in unused]}: "
    f"each pattern must match a whole name of the model, such as {names[0]!r}{hint}"
  )
