"""Every shipped recipe configures what its golden text describes, and begins with a lab note."""

from __future__ import annotations

import ast
import itertools
import pathlib
import re
import shlex
from collections.abc import Iterator
from typing import Any

import gin
import jax.numpy as jnp
import pytest
from golden_recipes import (
  GOLDEN,
  INCLUDED_BEFORE,
  KINDS,
  PARAMETERS,
  bound_model,
  every_recipe,
  golden_text,
  read_golden,
  resolve,
  shapes_of,
)

from rosetta_t5.config.language.statements import Macro, Reference, read_program
from rosetta_t5.config.t5x_surface import RECIPES, find_gin_file

TEXTS = {
  name: golden for kind in KINDS for name, golden in read_golden(GOLDEN / f"{kind}.txt").items()
}
# Millions of parameters, from the papers and T5X's documentation.
PUBLISHED = {
  "t5_1_0": {"small": 60.5, "base": 222.9, "large": 737.7, "3B": 2851.6, "11B": 11307},
  "t5_1_1": {"small": 77.0, "base": 247.6, "large": 783.2, "xl": 2849.8, "xxl": 11135},
  "mt5": {"small": 300, "base": 582, "large": 1230, "xl": 3740, "xxl": 12920},
  "moe": {
    # Fedus et al. 2021 (billions for XXL and C), and the number of parameters of the public checkpoints.
    "switch_base_8": 619,
    "switch_base_16": 1073,
    "switch_base_32": 1979,
    "switch_base_64": 3791,
    "switch_base_128": 7415,
    "switch_base_256": 14664,
    "switch_large_128": 26300,
    "switch_xxl_128": 395e3,
    "switch_c_2048": 1571e3,
  },
  "byt5": {"small": 300, "base": 582, "large": 1230, "xl": 3740, "xxl": 12900},
}


@pytest.fixture(autouse=True)
def empty_gin() -> Iterator[None]:
  gin.clear_config()
  yield
  gin.clear_config()


# Recipes whose networks differ from that of the first of their folder in more than sizes.
_OTHER_NETWORKS = ("switch_base_8", "tglobal_base", "9b_2b", "quickstart_experts", "gpt_126m_pile")


def _quick_networks() -> list[Any]:
  """Returns all recipes; those besides the first of each folder and _OTHER_NETWORKS are slow."""
  folders = [name.rpartition("/")[0] for name in TEXTS]
  return [
    pytest.param(
      name,
      marks=[pytest.mark.slow]
      * (folder in folders[:n] and not any(part in name for part in _OTHER_NETWORKS)),
    )
    for n, (name, folder) in enumerate(zip(TEXTS, folders, strict=True))
  ]


@pytest.mark.parametrize("name", TEXTS)
def test_a_recipe_binds_what_its_golden_text_says(name):
  lines = TEXTS[name].splitlines()
  bound = [line for line in lines if not line.lstrip().startswith(PARAMETERS)]
  found = golden_text(name, with_parameters=False).splitlines()
  assert found == bound, "if the change is intended, run `make golden`"


@pytest.mark.parametrize("name", _quick_networks())
def test_a_recipe_has_the_parameters_of_its_golden_text(name):
  assert golden_text(name) == TEXTS[name], "if the change is intended, run `make golden`"


def test_every_recipe_has_a_golden_text():
  assert sorted(TEXTS) == every_recipe()


def _parameters(name: str) -> int:
  found = re.search(r"parameters: ([\d,]+) in", TEXTS[name])
  assert found
  return int(found[1].replace(",", ""))


@pytest.mark.parametrize(
  ("name", "millions"),
  [(f"models/{f}/{size}", m) for f, sizes in PUBLISHED.items() for size, m in sizes.items()],
)
def test_models_have_the_published_sizes(name, millions):
  assert _parameters(name) / 1e6 == pytest.approx(millions, rel=3e-3)


# Billions, as rounded by Zoph et al. 2022 (ST-MoE), Aryabumi et al. 2024 (8), Brown et al. 2020 (175), Pax (126M, 5B), Narayanan et al.
# 2021 (the others).
ROUNDED = {
  "moe/st_moe_large": "4.1",
  "moe/st_moe_32b": "269",
  "cohere/aya_23_8b": "8.0",
  "gpt/126m": "0.125",
  "gpt/5b": "5",
  "gpt/175b": "175",
  "gpt/1_7b": "1.7",
  "gpt/3_6b": "3.6",
  "gpt/7_5b": "7.5",
  "gpt/18_4b": "18.4",
  "gpt/39_1b": "39.1",
  "gpt/76_1b": "76.1",
  "gpt/145_6b": "145.6",
  "gpt/310_1b": "310.1",
}


@pytest.mark.parametrize(("model", "billions"), ROUNDED.items())
def test_models_have_the_rounded_published_sizes(model, billions):
  digits = len(billions.partition(".")[2])
  assert f"{_parameters(f'models/{model}') / 1e9:.{digits}f}" == billions


# The numbers of parameters that Transformers 5.24 counts for the published configurations.
EXACT = {
  "llama3": {"1b": 1235814400, "3b": 3212749824, "8b": 8030261248, "70b": 70553706496},
  "qwen2_5": {"0_5b": 494032768, "1_5b": 1543714304, "3b": 3085938688, "7b": 7615616512}
  | {"14b": 14770033664, "32b": 32763876352, "72b": 72706203648},
  "qwen3": {"0_6b": 596049920, "1_7b": 1720574976, "4b": 4022468096, "8b": 8190735360}
  | {"14b": 14768307200, "32b": 32762123264},
  "gemma2": {"2b": 2614341888, "9b": 9241705984, "27b": 27227128320},
  "gemma3": {"270m": 268098176, "1b": 999885952, "4b": 3880263168, "12b": 11766034176}
  | {"27b": 27009346304},
  "t5gemma": {"s_s": 312517632, "b_b": 591490560, "l_l": 1241761792, "ml_ml": 2200345344}
  | {"xl_xl": 3766980608, "2b_2b": 5596853760, "9b_2b": 12292375296, "9b_9b": 20333401088},
  "t5gemma2": {"270m_270m": 368424832, "1b_1b": 1697783168, "4b_4b": 7089112576},
}


@pytest.mark.parametrize(
  ("name", "count"),
  [(f"models/{f}/{size}", n) for f, sizes in EXACT.items() for size, n in sizes.items()],
)
def test_todays_models_have_the_published_sizes_besides_rows_that_are_no_tokens(name, count):
  def value(field):
    found = re.search(rf"\b{field}=(\w+)", TEXTS[name])
    return int({"True": 1, "False": 0, None: 0}.get(found and found[1], found and found[1]))

  rows = value("unused_rows") + value("padding_never_follows")
  tables = 2 - value("logits_via_embedding")
  assert _parameters(name) - rows * tables * value("emb_dim") == count


def test_gpt2_has_the_published_size_and_an_embedding_for_padding():
  assert _parameters("models/gpt/gpt2") == 124_439_808 + 768  # the first is transformers' count


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in TEXTS if n.startswith("models/")])
def test_all_layers_have_the_shapes_of_the_first(name):
  resolve(*([INCLUDED_BEFORE[name]] if name in INCLUDED_BEFORE else []), name)
  model = bound_model()
  assert shapes_of(model) == shapes_of(model, in_full=True)


def test_every_model_except_gpt2_computes_in_bfloat16():
  models = {n for n in TEXTS if n.startswith("models/") and "MODEL = " in TEXTS[n]}
  others = {name for name in models if "dtype='bfloat16'" not in TEXTS[name]}
  assert others == {"models/gpt/gpt2"}  # its outputs are compared with those of transformers


def test_adamw_opt_replaces_adafactor():
  resolve("models/t5_1_1/tiny", "models/t5_1_1/adamw_opt")
  model = bound_model()
  assert model.module.config.scale_attn_logits
  state = model.optimizer_def.init_state({"w": jnp.ones(3)})
  assert type(state.param_states[1][0]).__name__ == "ScaleByAdamState"


# The fields of lab notes by folder.
NOTED = {
  "models": ["Paper", "Command"],
  "optimizers": ["Paper", "Memory", "Start", "Schedule", "Command"],
}


def _note(name: str) -> str:
  """Returns the comment at the top of a recipe, without its number signs."""
  lines = (RECIPES / f"{name}.gin").read_text(encoding="utf-8").splitlines()
  return "\n".join(line[2:] for line in itertools.takewhile(lambda x: x[:1] == "#", lines))


@pytest.mark.parametrize("name", every_recipe())
def test_a_recipe_begins_with_a_lab_note(name):
  fields = re.findall(r"^(\w+) {2,}\S", _note(name), flags=re.MULTILINE)
  wanted = NOTED.get(name.partition("/")[0], ["Paper", "Hardware", "Expect"])
  assert not set(wanted) - {"Expect" if f == "Expected" else f for f in fields}
  assert _note(name).splitlines()[0].endswith((".", ":", "?", ","))


@pytest.mark.parametrize("name", [n for n in every_recipe() if n.startswith("models/")])
def test_sizes_in_lab_notes_are_correct(name):
  noted = re.search(r"([\d.,]+)( [mb]illion)? parameters", _note(name))
  if noted and name in TEXTS:
    unit = {" million": 1e6, " billion": 1e9}.get(noted[2], 1)
    assert float(noted[1].replace(",", "")) * unit == pytest.approx(_parameters(name), rel=4e-3)


@pytest.mark.parametrize("name", every_recipe())
def test_files_in_the_command_of_a_lab_note_exist(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  command = re.sub(r"\\\n\s*", "", _note(name).partition("Command")[2].partition("\n\n")[0])
  files = re.findall(r"(?:--gin_file=|include '|see )([\w./]+\.gin)", command)
  assert files or "as gin/" in command or ".sh" in command
  for file in set(files) - {"your_run.gin"}:
    assert find_gin_file(file, ["."]).is_file()
  if "python -m" in command:
    shlex.split(command)


def _written(value: Any) -> Any:
  """Returns a gin value; references and macros as gin code."""
  return repr(value) if isinstance(value, (Macro, Reference)) else value


def test_pretraining_keeps_t5x_defaults():
  program = read_program([str(RECIPES / "runs/pretrain.gin")])
  written = {binding.name: _written(binding.value) for binding in program.all_bindings()}
  lines = pathlib.Path(__file__).with_name("pretrain_defaults.txt").read_text().splitlines()
  defaults = {n: ast.literal_eval(value) for n, value in (line.split(" = ", 1) for line in lines)}
  assert written == defaults
