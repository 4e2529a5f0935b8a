"""Renaming between a checkpoint's names and the model's, by pairs of regular expressions."""

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

  For each of the model's names the first pattern that matches it whole decides: it takes the value
  of the checkpoint's name that the replacement gives (\\1 stands for the first group), or is left out
  if the replacement is None. Names that no pattern matches, and the checkpoint's that nobody took,
  stay as they are.

  Args:
    ckpt_optimizer_state: the checkpoint's nested state dict.
    optimizer_state: the model's.
    assignment_map: (pattern of the model's name, replacement or None) pairs.
    require_all_rules_match: refuse patterns that match no name.
    is_resuming: whether the checkpoint is the run's own, whose names are right already.

  Raises:
    ValueError: a replacement names what the checkpoint does not have, or a pattern matches nothing.
  """
  if is_resuming:
    return dict(ckpt_optimizer_state)
  stored = flatten_state_dict(ckpt_optimizer_state)
  names = list(flatten_state_dict(optimizer_state))
  ruled, used = _by_rules(names, assignment_map, stored)
  unused = [pair for number, pair in enumerate(assignment_map) if number not in used]
  if require_all_rules_match and unused:
    raise ValueError(_no_match(unused, names))
  taken = set(ruled.values())
  kept = {n: leaf for n, leaf in stored.items() if n not in taken and ruled.get(n, n) is not None}
  # A name of the model that no rule moved keeps its value, even one that another name took as well.
  same = {n: stored[n] for n in names if n in stored and n not in ruled}
  moved = {name: stored[source] for name, source in ruled.items() if source is not None}
  for name in moved:
    _log.info("assignment_map: %s takes %s", name, ruled[name])
  return unflatten_state_dict({**kept, **same, **moved})


def _by_rules(
  names: Sequence[str], assignment_map: AssignmentMap, stored: Mapping[str, Any]
) -> tuple[dict[str, str | None], set[int]]:
  """Returns what each name that a rule matches takes, None for nothing; and which rules matched."""
  rules = [(re.compile(pattern), replacement) for pattern, replacement in assignment_map]
  ruled: dict[str, str | None] = {}
  used = set()
  for name in names:
    number, source = _first_match(rules, name)
    if number is None:
      continue
    if source is not None and source not in stored:
      raise ValueError(_no_source(name, source, assignment_map[number], stored))
    used.add(number)
    ruled[name] = source
  return ruled, used


def _first_match(
  rules: Sequence[tuple[re.Pattern[str], str | None]], name: str
) -> tuple[int | None, str | None]:
  """Returns the number of the first rule that matches `name`, and the checkpoint's name it gives."""
  for number, (pattern, replacement) in enumerate(rules):
    if match := pattern.fullmatch(name):
      return number, None if replacement is None else match.expand(replacement)
  return None, None


def _no_source(name: str, source: str, rule: Any, stored: Mapping[str, Any]) -> str:
  near = difflib.get_close_matches(source, stored, n=3)
  hint = f"near names there: {', '.join(near)}" if near else f"it has {len(stored)} others"
  return (
    f"RestoreCheckpointConfig.assignment_map: the rule {rule!r} wants {source!r} of the checkpoint "
    f"for {name!r}, which the checkpoint does not have; {hint}. Correct the replacement, or make it "
    "None and set fallback_to_scratch = True"
  )


def _no_match(unused: Sequence[Any], names: Sequence[str]) -> str:
  near = difflib.get_close_matches(str(unused[0][0]), names, n=3, cutoff=0.4)
  hint = f"; names near the first: {', '.join(near)}" if near else ""
  return (
    f"RestoreCheckpointConfig.assignment_map: Unused patterns {[pattern for pattern, _ in unused]}: "
    f"each pattern has to match a whole name of the model, such as {names[0]!r}{hint}"
  )
