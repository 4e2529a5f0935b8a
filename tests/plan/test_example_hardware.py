"""Every training recipe under gin/examples fits the GPUs that its header names, according to `plan`."""

from __future__ import annotations

import pathlib
import re
import shlex

import gin
import pytest

from rosetta_t5.config import run_from_command_line
from rosetta_t5.plan.configurations import USABLE
from rosetta_t5.plan.description import Plan
from rosetta_t5.plan.memory import StateMemory
from rosetta_t5.terminal import size_text

EXAMPLES = pathlib.Path("gin/examples")
# They restore a checkpoint and train nothing.
NOT_TRAINING = re.compile(r"_(eval|infer)\.gin$")
_CLAUSE = re.compile(r"\b(one|\d+) (?:GPUs? with (\d+) GB|(?:A100 (\d+) GB|H100\b))")
# Recipes of larger models take seconds to minutes, and three of small have the shapes of others.
_SLOW = re.compile(r"/(base(?!_pile)|large|xl|xxl|c4|small_c4|small_mnli2)_|_(large|xl|xxl)\.gin$")


def field(recipe: pathlib.Path, name: str) -> str:
  """Returns a field of a recipe's header, its lines joined."""
  found = re.search(rf"^# {name} +(.*\n(?:#  .*\n)*)", recipe.read_text(), re.MULTILINE)
  return re.sub(r"\s*\\?\n#\s*", " ", found[1]).strip() if found else ""


def flags(text: str) -> list[str]:
  """Returns the --gin flags in a text, except those of paths."""
  words = shlex.split(text) if "--gin." in text else []
  return [word for word in words if word.startswith("--gin.") and "MODEL_DIR" not in word]


def hardware(recipe: pathlib.Path) -> list[tuple[int, float, list[str]]]:
  """Returns the alternatives that a header names: number of GPUs, bytes of each, and flags to add."""
  found = []
  for clause in field(recipe, "Hardware").split("; "):
    match = _CLAUSE.search(clause)
    if match:
      count, memory = match[1], float(match[2] or match[3] or 80) * 1e9
      added = flags(clause[match.end() :])
      found.append((1 if count == "one" else int(count), memory, added))
  return found


# They are used with a model's folder, which sets the lengths; tests/golden_recipes.py builds them.
_OF_FOLDERS = ("finetune_rows.gin", "finetune_chat.gin")
RECIPES = [path for path in sorted(EXAMPLES.rglob("*.gin")) if not NOT_TRAINING.search(path.name)]
ON_GPUS = [path for path in RECIPES if re.search("GPU|A100|H100", field(path, "Hardware"))]
ON_GPUS = [path for path in ON_GPUS if path.name not in _OF_FOLDERS]


@pytest.mark.slow
def test_the_length_of_prepared_rows_is_that_of_one_feature():
  (recipe,) = [path for path in RECIPES if path.name == "base_pretrain_noncausal_prefix_lm.gin"]
  alone = planned_memory(recipe, 2048, [])
  assert alone["logits"] == 2 * 4 * 626 * 32128


def test_headers_that_name_gpus_state_their_number_and_memory():
  assert len(ON_GPUS) > 25
  assert [str(path) for path in ON_GPUS if not hardware(path)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
  "recipe",
  [
    pytest.param(path, id=str(path.relative_to(EXAMPLES)), marks=[pytest.mark.slow] * is_slow)
    for path in ON_GPUS
    for is_slow in [bool(_SLOW.search(str(path)))]
  ],
)
def test_recipe_fits_the_hardware_of_its_header(recipe):
  command = flags(field(recipe, "Command").partition("--gin_file")[2])
  for count, limit, added in hardware(recipe):
    parts = planned_memory(recipe, count, [*command, *added])
    text = f"{size_text(sum(parts.values()))} on {count} GPUs with {size_text(limit)}: {parts}"
    assert sum(parts.values()) <= USABLE * limit, text


def planned_memory(recipe: pathlib.Path, devices: int, arguments: list[str]) -> dict[str, float]:
  """Returns the bytes per device of a recipe's training step."""
  found: dict[str, float] = {}

  def describe(resolved):
    assert not resolved.problems.messages
    plan = Plan(resolved)
    found.update(StateMemory.of(plan.state, plan.specs, plan.work).step(plan.work))
    return []

  argv = ["rosetta-t5 plan", f"--gin_file={recipe}", "--gin.MODEL_DIR='not made'", *arguments]
  run_from_command_line(None, [*argv, "--dry_run", f"--devices={devices}"], describe)
  gin.clear_config()
  return found
