"""T5X's paths find the recipes from any folder, unless the user has a file of that path."""

from __future__ import annotations

import pathlib

import gin
import pytest

from rosetta_t5.config.language.statements import read_program
from rosetta_t5.config.t5x_surface import RECIPES, find_gin_file

EVERY_RECIPE = sorted(RECIPES.rglob("*.gin"))


@pytest.mark.parametrize(
  ("path", "recipe"),
  [
    ("t5x/configs/runs/pretrain.gin", "runs/pretrain.gin"),
    ("t5x/examples/t5/t5_1_1/small.gin", "models/t5_1_1/small.gin"),
    ("t5x/examples/t5/t5_1_0/3B.gin", "models/t5_1_0/3B.gin"),
    ("t5x/examples/t5/byt5/base.gin", "models/byt5/base.gin"),
    ("t5x/examples/t5/local_tiny.gin", "models/local_tiny.gin"),
    (
      "t5x/examples/t5/t5_1_1/examples/base_wmt_from_scratch.gin",
      "examples/base_wmt_from_scratch.gin",
    ),
    ("t5x/contrib/gpu/t5/t5_1_1/adamw_opt.gin", "models/t5_1_1/adamw_opt.gin"),
    ("t5x/contrib/gpu/t5/mt5/xl.gin", "models/mt5/xl.gin"),
    ("t5x/contrib/gpu/t5/configs/runs/finetune_mnli.gin", "runs/finetune_mnli.gin"),
    (
      "t5x/contrib/gpu/t5/t5_1_1/examples/xxl_pile_pretrain.gin",
      "examples/xxl_pile_pretrain.gin",
    ),
    ("t5x/examples/scalable_t5/t5_1_1/xl.gin", "models/scalable_t5/t5_1_1/xl.gin"),
    ("t5x/examples/scalable_t5/mt5/base.gin", "models/scalable_t5/mt5/base.gin"),
    ("t5x/examples/scalable_t5/umt5/vocab.gin", "models/umt5/vocab.gin"),
    ("t5x/examples/scalable_t5/umt5/pretrain_xxl.gin", "examples/umt5/pretrain_xxl.gin"),
    ("t5x/examples/decoder_only/models/base.gin", "models/decoder_only/base.gin"),
    ("t5x/examples/decoder_only/base.gin", "models/decoder_only/base.gin"),
    ("./t5x/configs/runs/eval.gin", "runs/eval.gin"),
    ("t5x/t5x/configs/runs/eval.gin", "runs/eval.gin"),  # beside a checkout of T5X
    ("t5x/contrib/moe/configs/runs/sparse_upcycle.gin", "runs/moe/sparse_upcycle.gin"),
    ("gin/runs/pretrain.gin", "runs/pretrain.gin"),
    ("gin/models/t5_1_1/tiny.gin", "models/t5_1_1/tiny.gin"),
  ],
)
def test_paths_of_t5x_and_of_this_repository_find_recipes(path, recipe, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert find_gin_file(path, ["."]).samefile(RECIPES / recipe)


def test_a_file_of_the_user_wins_over_a_recipe(write, tmp_path):
  path = "t5x/configs/runs/pretrain.gin"
  write(f"elsewhere/{path}", "")
  assert find_gin_file(path, [".", "elsewhere"]) == pathlib.Path("elsewhere", path)
  write(path, "")
  assert find_gin_file(path, [".", "elsewhere"]) == pathlib.Path(path)


@pytest.mark.parametrize(
  ("path", "near"),
  [
    (
      "t5x/configs/runs/eval_with_prediction_service.gin",
      "t5x/configs/runs/",
    ),
    ("t5x/examples/t5/t5_1_1/smal.gin", "t5x/examples/t5/t5_1_1/small.gin"),
    (
      "t5x/contrib/moe/configs/runs/finetun.gin",
      "t5x/contrib/moe/configs/runs/finetune.gin",
    ),
  ],
)
def test_an_unknown_path_of_t5x_gets_similar_names(path, near, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match=f"there is no gin file '{path}'. Did you mean .*") as error:
    find_gin_file(path, ["."])
  assert near in str(error.value)


def test_an_absolute_path_is_never_a_recipe(tmp_path):
  hint = r"there is no gin file '.*'\. Did you mean gin/runs/pretrain\.gin\?"
  with pytest.raises(ValueError, match=hint):
    find_gin_file(str(tmp_path / "gin/runs/pretrain.gin"), ["."])


def test_gins_own_parser_finds_recipes(write, tmp_path, monkeypatch):
  write("runs/small.gin", "STEPS = 2")
  monkeypatch.setattr("rosetta_t5.config.t5x_surface.RECIPES", tmp_path)
  gin.parse_config_file("t5x/configs/runs/small.gin")
  assert gin.query_parameter("STEPS/macro.value") == 2


@pytest.mark.parametrize("recipe", EVERY_RECIPE, ids=lambda path: str(path.relative_to(RECIPES)))
def test_every_recipe_can_be_read_from_any_folder(recipe, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert list(read_program([str(recipe)]).all_bindings())
