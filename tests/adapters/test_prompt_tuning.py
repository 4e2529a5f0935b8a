"""Runs that train a prompt begin with rows of the restored embedding table, and store the prompt alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
from test_folder_runs import make_folder, train

from rosetta_t5 import trained_model
from rosetta_t5.checkpoints.checkpoint_folders import read_arrays
from rosetta_t5.checkpoints.formats import t5x_layouts

IMPORT = "--gin_bindings=from rosetta_t5 import adapters"
PROMPT = ("models.{model}.adapter=@adapters.PromptTuning()", "adapters.PromptTuning.length=6")
UNPACKED = ("train/utils.DatasetConfig.pack=False",)
NO_EVALUATION = "train_script.train.train_eval_dataset_cfg=None"
ADAMW = ("OPTIMIZER=@optimizers.adamw()", NO_EVALUATION, *UNPACKED)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5gemma", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_prompt_begins_with_rows_of_the_base_s_table_and_is_stored_alone(family, tmp_path):
  rows = tmp_path / "rows.jsonl"
  rows.write_text(
    "".join(json.dumps({"a": f"w{n} w9", "b": f"w9 w{n}"}) + "\n" for n in range(3, 40))
  )
  found, tmp_path = (
    (family, make_folder(tmp_path / "model", family, layers=2), rows),
    tmp_path / "run",
  )
  rate = "optimizers.adamw.learning_rate=0.0"
  losses = train(found, tmp_path, *PROMPT, *ADAMW, rate, imports=[IMPORT])
  side = "decoder" if family == "llama" else "encoder"
  name = f"target/{side}/prompt/prompt/prompt"
  stored = t5x_layouts.read_arrays(tmp_path / "checkpoint_2")
  assert [each for each in stored if each.startswith("target/")] == [name]
  base = read_arrays(found[1])
  own = base.get(f"target/{side}/token_embedder/embedding")
  table = (own or base["target/token_embedder/embedding"]).get()
  vectors = stored[name].get()
  assert vectors.shape == (6, table.shape[1])
  assert all((table == vector).all(axis=1).any() for vector in vectors)
  opened = trained_model.open_model_dir(tmp_path)
  np.testing.assert_array_equal(opened.state.params[side]["prompt"]["prompt"]["prompt"], vectors)
  continued = train(
    found, tmp_path, *PROMPT, *ADAMW, rate, "TRAIN_STEPS=3", imports=[IMPORT], steps=(3,)
  )
  assert 0.8 < continued[0] / losses[-1] < 1.2
