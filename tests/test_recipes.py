"""Every shipped model is built, by shapes alone, and every run keeps T5X's defaults."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import gin
import jax
import jax.numpy as jnp
import pytest

from rosetta_t5.config.gin_files import Macro, Reference, read_program
from rosetta_t5.config.parsing import configure
from rosetta_t5.config.t5x_paths import RECIPES

MODELS = RECIPES / "models"
# Parameters, arrays, layers of encoder and decoder: T5X's models (t5_1_1 by its README).
GOLDEN = """
t5_1_0/11B    11,307,321,344   509  24/24
t5_1_0/3B      2,851,598,336   509  24/24
t5_1_0/base      222,903,552   257  12/12
t5_1_0/large     737,668,096   509  24/24
t5_1_0/small      60,506,624   131   6/6
t5_1_1/base      247,577,856   282  12/12
t5_1_1/large     783,150,080   558  24/24
t5_1_1/small      76,961,152   190   8/8
t5_1_1/tiny          518,240    52   2/2
t5_1_1/xl      2,849,757,184   558  24/24
t5_1_1/xxl    11,135,332,352   558  24/24
""".strip().splitlines()


@pytest.fixture(autouse=True)
def empty_gin() -> Iterator[None]:
  gin.clear_config()
  yield
  gin.clear_config()


def build(model: Any) -> Any:
  """Stands for a run page that builds a model and does nothing with it."""
  return model


def _model(recipe: str, *bindings: str) -> Any:
  # A vocabulary that no bucket has to be asked for.
  given = ("build.model = %MODEL", "DROPOUT_RATE = 0.0", "VOCABULARY = None", *bindings)
  return configure(read_program([f"{MODELS}/{recipe}.gin"], given, ["."]), build)()


def _shapes(model: Any) -> Any:
  tokens = {"encoder_input_tokens": (1, 16), "decoder_input_tokens": (1, 8)}
  init = jax.eval_shape(lambda rng: model.get_initial_variables(rng, tokens), jax.random.PRNGKey(0))
  return init["params"]


def _large_ones_are_slow(line: str) -> Any:
  marks = [pytest.mark.slow] if line.endswith("24/24") else []
  return pytest.param(line, marks=marks, id=line.split()[0])


@pytest.mark.parametrize("golden", [_large_ones_are_slow(line) for line in GOLDEN])
def test_models_have_the_published_sizes(golden):
  recipe = golden.split()[0]
  model = _model(recipe)
  shapes = _shapes(model)
  leaves = jax.tree.leaves(shapes)
  layers = [
    sum(name.startswith("layers_") for name in shapes[part]) for part in ("encoder", "decoder")
  ]
  count = sum(leaf.size for leaf in leaves)
  built = f"{recipe:<10}{count:>18,}{len(leaves):>6}{layers[0]:>4}/{layers[1]}"
  assert built.split() == golden.split()
  assert jnp.dtype(model.module.config.dtype) == jnp.bfloat16


def test_golden_names_every_model():
  recipes = {str(p.relative_to(MODELS).with_suffix("")) for p in MODELS.rglob("*.gin")}
  models = {r for r in recipes if not r.endswith("_opt")}
  assert {line.split()[0] for line in GOLDEN} == models


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda line: line.split()[0])
def test_lab_notes_give_the_size(golden):
  recipe, count, *_ = golden.split()
  noted = re.search(r"([\d.,]+)( [mb]illion)? parameters", (MODELS / f"{recipe}.gin").read_text())
  assert noted
  unit = {" million": 1e6, " billion": 1e9}.get(noted[2], 1)
  assert float(noted[1].replace(",", "")) * unit == pytest.approx(
    int(count.replace(",", "")), rel=2e-3
  )


def test_adamw_takes_the_place_of_adafactor():
  model = _model("t5_1_1/tiny", f"include '{MODELS}/t5_1_1/adamw_opt.gin'")
  assert model.module.config.scale_attn_logits
  state = model.optimizer_def.init_state({"w": jnp.ones(3)})
  assert {leaf.shape for leaf in jax.tree.leaves(state.param_states)} >= {(3,)}


def _written(value: Any) -> Any:
  """A gin value as it stands in the file."""
  match value:
    case Reference(name=name, evaluate=evaluate):
      return f"@{name}{'()' if evaluate else ''}"
    case Macro(name=name):
      return f"%{name}"
    case _:
      return value


def test_pretraining_keeps_t5x_defaults():
  program = read_program([str(RECIPES / "runs/pretrain.gin")], [], ["."])
  written = {binding.name: _written(binding.value) for binding in program.bindings_in_order()}
  facts = pathlib.Path(__file__).with_name("pretrain_defaults.txt").read_text().splitlines()
  golden = {
    name: ast.literal_eval(value) for name, value in (line.split(" = ", 1) for line in facts)
  }
  assert written == golden
