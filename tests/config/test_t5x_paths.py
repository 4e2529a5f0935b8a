"""T5X's paths lead to the recipes, from anywhere, unless the user has a file of that path."""

from __future__ import annotations

import pathlib

import gin
import pytest

from rosetta_t5.config.gin_files import read_program
from rosetta_t5.config.t5x_paths import RECIPES, find_gin_file

EVERY_RECIPE = sorted(RECIPES.rglob("*.gin"))


@pytest.mark.parametrize(
  ("path", "recipe"),
  [
    ("t5x/configs/runs/pretrain.gin", "runs/pretrain.gin"),
    ("t5x/examples/t5/t5_1_1/small.gin", "models/t5_1_1/small.gin"),
    ("t5x/examples/t5/t5_1_0/3B.gin", "models/t5_1_0/3B.gin"),
    ("t5x/contrib/gpu/t5/t5_1_1/adamw_opt.gin", "models/t5_1_1/adamw_opt.gin"),
    ("gin/runs/pretrain.gin", "runs/pretrain.gin"),
    ("gin/models/t5_1_1/tiny.gin", "models/t5_1_1/tiny.gin"),
  ],
)
def test_paths_of_t5x_and_of_this_repository_lead_to_recipes(path, recipe, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert find_gin_file(path, ["."]).samefile(RECIPES / recipe)


def test_a_file_of_the_user_wins(write, tmp_path):
  path = "t5x/configs/runs/pretrain.gin"
  write(f"elsewhere/{path}", "")
  assert find_gin_file(path, [".", "elsewhere"]) == pathlib.Path("elsewhere", path)
  write(path, "")
  assert find_gin_file(path, [".", "elsewhere"]) == pathlib.Path(path)


def test_an_absolute_path_is_never_a_recipe(tmp_path):
  with pytest.raises(ValueError, match="there is no gin file"):
    find_gin_file(str(tmp_path / "gin/runs/pretrain.gin"), ["."])


def test_gins_own_parser_finds_recipes(write, tmp_path, monkeypatch):
  write("runs/small.gin", "STEPS = 2")
  monkeypatch.setattr("rosetta_t5.config.t5x_paths.RECIPES", tmp_path)
  gin.parse_config_file("t5x/configs/runs/small.gin")
  assert gin.query_parameter("STEPS/macro.value") == 2


@pytest.mark.parametrize("recipe", EVERY_RECIPE, ids=lambda path: str(path.relative_to(RECIPES)))
def test_every_recipe_reads_and_begins_with_a_lab_note(recipe, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert list(read_program([str(recipe)], [], ["."]).bindings_in_order())
  note = recipe.read_text().split("\n\n")[0].splitlines()
  assert all(line.startswith("#") for line in note[:3])
  assert any("ommand" in line for line in note), "the note ends with the exact command"
