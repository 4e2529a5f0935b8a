"""Runs that train an adapter: what is trained, what checkpoints hold, restarts, and other bases."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_folder_runs import make_folder, train

from rosetta_t5 import adapters, cli, trained_model
from rosetta_t5.checkpoints.adapter_checkpoints import check_base
from rosetta_t5.checkpoints.arrays.state_dicts import flatten_state_dict
from rosetta_t5.checkpoints.checkpoint_folders import read_arrays
from rosetta_t5.checkpoints.formats import t5x_layouts
from rosetta_t5.conversion.convert import convert
from rosetta_t5.interactive import open_model
from rosetta_t5.training.optimizers.optax_wrapper import adamw

IMPORT = "--gin_bindings=from rosetta_t5 import adapters"
LORA = ("models.{model}.adapter=@adapters.LoRA()", "adapters.LoRA.rank=4")
FP8 = ("train_script.train.te_config_cls=@te_helper.TransformerEngineConfig",)
FP8 += (
  "te_helper.TransformerEngineConfig.enabled=1",
  "te_helper.TransformerEngineConfig.emulate=True",
)
SAVE_DATA = "utils.SaveCheckpointConfig.save_dataset=True"
NO_EVALUATION = "train_script.train.train_eval_dataset_cfg=None"
ADAMW = (
  SAVE_DATA,
  NO_EVALUATION,
  "OPTIMIZER=@optimizers.adamw()",
  "optimizers.adamw.learning_rate=0.01",
)


@pytest.fixture(scope="module", params=["t5gemma", pytest.param("llama", marks=pytest.mark.slow)])
def found(request, tmp_path_factory):
  """Returns (the family, its folder, a file of rows)."""
  root = tmp_path_factory.mktemp("folder")
  random = np.random.default_rng(0)
  with (root / "rows.jsonl").open("w") as file:
    for _ in range(64):
      words = [f"w{n}" for n in random.integers(3, 40, random.integers(5, 12))]
      print(json.dumps({"a": " ".join(words), "b": " ".join(words[::-1])}), file=file)
  return request.param, make_folder(root / "model", request.param, layers=2), root / "rows.jsonl"


@pytest.fixture(scope="module")
def adapted(found, tmp_path_factory):
  """Returns the losses of a run with LoRA, and its directory."""
  model_dir = tmp_path_factory.mktemp("lora") / "run"
  return train(found, model_dir, *LORA, *ADAMW, imports=[IMPORT]), model_dir


@pytest.mark.slow
def test_checkpoints_hold_the_adapter_and_its_optimizer_state_only(adapted):
  _, model_dir = adapted
  stored = t5x_layouts.read_arrays(model_dir / "checkpoint_2")
  assert {name.rpartition("/")[2] for name in stored if name.startswith("target/")} == {
    "lora_a",
    "lora_b",
  }
  states = [name for name in stored if name.startswith("state/param_states")]
  assert states
  assert all("lora" in name or name.endswith("count") for name in states)
  # Opened, it is complete.
  opened = read_arrays(model_dir / "checkpoint_2")
  assert sum(name.endswith("/kernel") for name in opened)
  shutil.copytree(model_dir / "checkpoint_2", model_dir.parent / "best")
  assert read_arrays(model_dir.parent / "best").keys() == opened.keys()


@pytest.mark.slow
def test_frozen_parameters_do_not_change_and_predictions_are_those_of_the_merged_folder(
  found, adapted, tmp_path
):
  _, path, _ = found
  opened = trained_model.open_model_dir(adapted[1])
  base = {n: x.get() for n, x in read_arrays(path).items()}
  params = checkpoints_flat(opened.state.params)
  for name, value in params.items():
    if "lora" not in name:
      np.testing.assert_array_equal(value, base[f"target/{name}"])
  folder = convert(adapted[1], tmp_path / "hf", "hf")
  merged = trained_model.open_model_dir(folder)
  batch = {
    name: np.arange(3, 11)[None] for name in ("encoder_input_tokens", "decoder_input_tokens")
  }
  batch["decoder_target_tokens"] = batch["decoder_input_tokens"]
  loss = opened.model.loss_fn(opened.state.params, batch, None)[0]
  merged_loss = merged.model.loss_fn(merged.state.params, batch, None)[0]
  base_model = trained_model.open_model_dir(path)
  base_loss = base_model.model.loss_fn(base_model.state.params, batch, None)[0]
  np.testing.assert_allclose(loss, merged_loss, rtol=1e-5)
  assert abs(loss - base_loss) > 1e-3


def checkpoints_flat(params):
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x)
    for path, x in jax.tree_util.tree_leaves_with_path(params)
  }


@pytest.mark.slow
def test_a_restarted_run_continues_exactly(found, adapted, tmp_path):
  train(found, tmp_path / "run", *LORA, *ADAMW, "TRAIN_STEPS=1", imports=[IMPORT], steps=(1,))
  again = train(found, tmp_path / "run", *LORA, *ADAMW, imports=[IMPORT], steps=(2,))
  assert again == adapted[0][1:]
  whole, parts = (
    t5x_layouts.read_arrays(x / "checkpoint_2") for x in (adapted[1], tmp_path / "run")
  )
  for name, array in whole.items():
    np.testing.assert_array_equal(array.get(), parts[name].get(), err_msg=name)


@pytest.fixture
def moved(found):
  """Moves the base away and returns its new path; the test may put a folder or a link in its place."""
  _, path, _ = found
  yield path.rename(path.with_name("moved"))
  if path.is_symlink():
    path.unlink()
  shutil.rmtree(path, ignore_errors=True)
  path.with_name("moved").rename(path)


def test_only_the_base_of_the_fingerprint_is_accepted():
  base = {"target/a/kernel": np.arange(12.0).reshape(3, 4), "target/b/kernel": np.ones(3)}
  fact = {**adapters.LoRA().settings(), "base": "B", "base_parameters": [*base]}
  check_base("checkpoint", fact, base)  # of an earlier version
  fact["base_fingerprint"] = 0
  with pytest.raises(ValueError, match="B is not the model with which the adapter of checkpoint"):
    check_base("checkpoint", fact, base | {f"target/a/{adapters.LoRA.suffixes[0]}": np.ones(3)})
  check_base("checkpoint", fact, base)  # The adapter is merged.


@pytest.mark.slow
def test_another_base_is_refused(found, adapted, moved, tmp_path):
  _, path, _ = found
  with pytest.raises(ValueError, match=r"its base .* is missing"):
    trained_model.open_model_dir(adapted[1])
  shutil.copytree(moved, path)
  arrays = load_file(path / "model.safetensors")
  name = min(name for name in arrays if name.endswith("k_proj.weight"))
  arrays[name][3, 5] *= -1
  save_file(arrays, path / "model.safetensors", {"format": "pt"})
  for use in (trained_model.open_model_dir, lambda run: convert(run, tmp_path / "hf", "hf")):
    with pytest.raises(ValueError, match="is not the model with which the adapter"):
      use(adapted[1])


@pytest.mark.slow
def test_a_base_that_was_moved_and_stored_in_other_files_is_accepted(
  found, adapted, moved, tmp_path
):
  _, path, _ = found
  copy = shutil.copytree(moved, tmp_path / "copy")
  arrays = load_file(moved / "model.safetensors")
  (copy / "model.safetensors").unlink()
  names = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(arrays)}
  for file in {*names.values()}:
    save_file({n: x for n, x in arrays.items() if names[n] == file}, copy / file, {"format": "pt"})
  (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
  path.symlink_to(copy)
  assert trained_model.open_model_dir(adapted[1])


SWITCHES = {
  "scan": (["network.{config}.scan_layers=True"], 1e-5),
  "int8": (["adapters.LoRA.frozen_dtype='int8'"], 3e-2),
  "bfloat16": (["adapters.LoRA.frozen_dtype='bfloat16'"], 1e-2),
  "microbatches": (["trainer.Trainer.num_microbatches=2"], 1e-5),
  "tensor": (["partitioning.PjitPartitioner.mesh={{'tensor': 2}}"], 1e-5),
  "fsdp": (["partitioning.PjitPartitioner.mesh={{'fsdp': 2}}"], 1e-5),
  "context": (["partitioning.PjitPartitioner.mesh={{'context': 2}}"], 1e-5),
  "remat": (["network.{config}.remat_policy='full'"], 1e-5),
  "fp8": (list(FP8), 1e-1),
  "fused": (["network.{config}.fuse_qkv_params=True"], 1e-5),
}


@pytest.mark.slow
@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_does_not_change_the_loss(found, adapted, switch, tmp_path):
  bindings, tolerance = SWITCHES[switch]
  fp8 = ["--gin_bindings=from t5x import te_helper"] if switch == "fp8" else []
  losses = train(found, tmp_path / "run", *LORA, *ADAMW, *bindings, imports=[*fp8, IMPORT])
  # A is drawn by the names of projections, which scanned layers share.
  compared = 1 if switch == "scan" else 2
  np.testing.assert_allclose(losses[:compared], adapted[0][:compared], rtol=tolerance)
  assert trained_model.open_model_dir(tmp_path / "run").state is not None


@pytest.mark.slow
def test_a_pipeline_does_not_change_the_loss(found, tmp_path):
  family, _, rows = found
  deep = (family, make_folder(tmp_path / "model", family, layers=4), rows)
  scan = "network.{config}.scan_layers=True"
  pipeline = "partitioning.PjitPartitioner.mesh={{'pipeline': 2}}"
  whole, split = (
    train(deep, tmp_path / str(len(more)), *LORA, *ADAMW, scan, *more, imports=[IMPORT])
    for more in ((), (pipeline,))
  )
  np.testing.assert_allclose(split, whole, rtol=1e-5)


ADDED = {
  "LoRA": ({"lora_a", "lora_b", "dora_magnitude"}, ["adapters.LoRA.dora=True"]),
  "IA3": ({"ia3_scaling"}, []),
  "Norms": ({"scale"}, []),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ADDED)
def test_each_method_trains_its_parameters(found, method, tmp_path):
  names, bindings = ADDED[method]
  adapter = f"models.{{model}}.adapter=@adapters.{method}()"
  train(found, tmp_path / "run", adapter, *ADAMW, *bindings, imports=[IMPORT])
  stored = t5x_layouts.read_arrays(tmp_path / "run" / "checkpoint_2")
  trained = {name for name in stored if name.startswith("target/")}
  assert {name.rpartition("/")[2] for name in trained} == names
  opened = checkpoints_flat(trained_model.open_model_dir(tmp_path / "run").state.params)
  base = read_arrays(found[1])
  initial = {"lora_b": 0.0, "ia3_scaling": 1.0}
  for name in trained:
    before = initial.get(name.rpartition("/")[2], 0.0) if name not in base else base[name].get()
    assert np.any(opened[name.removeprefix("target/")] != before), name


@pytest.mark.slow
def test_a_notebook_trains_what_the_adapter_of_its_run_does(adapted, tmp_path):
  schedule = adamw(learning_rate=0.01)  # the notebook's own begins at 0
  model = open_model(adapted[1], str(tmp_path / "out"), optimizer_def=schedule)
  before = checkpoints_flat(model.train_state.params)
  model.train_step([{"input": "w5 w6 w7", "target": "w7 w6 w5"}] * 8)
  after = checkpoints_flat(model.train_state.params)
  changed = {name.rpartition("/")[2] for name, x in before.items() if np.any(after[name] != x)}
  assert changed == {"lora_a", "lora_b"}
  model = open_model(adapted[1], str(tmp_path / "adafactor"))
  model.train_step([{"input": "w5 w6 w7", "target": "w7 w6 w5"}] * 8)
  states = flatten_state_dict(model.train_state.state_dict()["state"]["param_states"])
  assert states
  assert all("lora" in name for name in states)


@pytest.mark.slow
def test_a_run_is_not_continued_with_another_method(found, adapted, tmp_path):
  shutil.copytree(adapted[1], tmp_path / "run")
  ia3 = ("models.{model}.adapter=@adapters.IA3()", "TRAIN_STEPS=3")
  with pytest.raises(AssertionError, match="trains LoRA, and this one IA3"):
    train(found, tmp_path / "run", *ia3, *ADAMW, imports=[IMPORT])


@pytest.mark.slow
def test_another_method_starts_from_the_merged_run_and_stores_all_parameters(
  found, adapted, tmp_path
):
  ia3 = ("models.{model}.adapter=@adapters.IA3()", "TRAIN_STEPS=4")
  start = f"INITIAL_CHECKPOINT_PATH='{adapted[1] / 'checkpoint_2'}'"
  train(found, tmp_path / "run", *ia3, *ADAMW, start, imports=[IMPORT], steps=(4,))
  stored = t5x_layouts.read_arrays(tmp_path / "run" / "checkpoint_4")
  assert sum(name.startswith("target/") and name.endswith("/kernel") for name in stored)
  assert trained_model.open_model_dir(tmp_path / "run").state is not None


@pytest.mark.slow
def test_an_adapter_is_opened_in_bfloat16(adapted):
  recipe, restore = trained_model.read_run(adapted[1])
  restore = dataclasses.replace(restore, dtype="bfloat16")
  opened = trained_model.open_checkpoint(recipe, restore)
  assert jax.tree.leaves(opened.state.params)[0].dtype == jax.numpy.bfloat16


@pytest.mark.slow
def test_vectors_of_texts_are_those_of_the_merged_folder(found, adapted, tmp_path):
  if found[0] != "t5gemma":
    pytest.skip("a decoder has no encoder")
  folder = convert(adapted[1], tmp_path / "hf", "hf")
  (tmp_path / "texts.txt").write_text("w5 w6 w7\nw8 w9\n")
  vectors = []
  for number, model in enumerate((adapted[1], folder)):
    output = tmp_path / f"{number}.npy"
    files = ["--input", str(tmp_path / "texts.txt"), "--output", str(output)]
    assert cli.main(["embed", "--model_dir", str(model), *files]) == 0
    vectors.append(np.load(output))
  np.testing.assert_allclose(*vectors, atol=1e-5)


@pytest.mark.slow
def test_an_adapter_is_written_for_peft_and_opened_again(found, adapted, tmp_path, capsys):
  folder = convert(adapted[1], tmp_path / "peft", "peft")
  assert {file.name for file in folder.iterdir()} >= {
    "adapter_config.json",
    "adapter_model.safetensors",
  }
  settings = json.loads((folder / "adapter_config.json").read_text())
  assert settings["base_model_name_or_path"] == str(found[1])
  assert (settings["r"], settings["lora_alpha"]) == (4, 8)
  assert settings["target_modules"] == ["q_proj", "v_proj"]
  ours, theirs = (trained_model.open_model_dir(path) for path in (adapted[1], folder))
  batch = {
    name: np.arange(3, 11)[None] for name in ("encoder_input_tokens", "decoder_input_tokens")
  }
  batch["decoder_target_tokens"] = batch["decoder_input_tokens"]
  losses = [x.model.loss_fn(x.state.params, batch, None)[0] for x in (ours, theirs)]
  np.testing.assert_allclose(*losses, rtol=1e-5)
  assert "logits of the adapter here and of the folder" in capsys.readouterr().out


@pytest.mark.slow
def test_training_continues_from_a_peft_folder(found, adapted, tmp_path):
  folder = convert(adapted[1], tmp_path / "peft", "peft")
  start = f"INITIAL_CHECKPOINT_PATH={str(folder)!r}"
  still = "optimizers.adamw.learning_rate=0.0"
  train(found, tmp_path / "run", *LORA, *ADAMW, start, still, imports=[IMPORT])
  before, after = (read_arrays(path / "checkpoint_2") for path in (adapted[1], tmp_path / "run"))
  for name, array in before.items():
    if name.startswith("target/"):
      np.testing.assert_allclose(after[name].get(), array.get(), rtol=1e-6)


@pytest.mark.slow
def test_weighted_adapters_are_sums_of_their_changes_of_the_base(found, adapted, tmp_path):
  folder = convert(adapted[1], tmp_path / "peft", "peft")
  base = checkpoints_flat(trained_model.open_model_dir(found[1]).state.params)
  merged = checkpoints_flat(trained_model.open_model_dir(folder).state.params)
  given = [str(adapted[1]), f"{folder}=0.5"]
  opened = trained_model.open_model_dir(found[1], adapters=given)
  added = checkpoints_flat(opened.state.params)
  for name, value in base.items():
    np.testing.assert_allclose(
      added[name], value + 1.5 * (merged[name] - value), rtol=1e-5, atol=1e-6
    )
  with pytest.raises(ValueError, match="--adapter needs the base as --model_dir"):
    trained_model.open_model_dir(folder, adapters=given)
  other = shutil.copytree(found[1], tmp_path / "other")
  weights = load_file(other / "model.safetensors")
  save_file({name: 2 * x for name, x in weights.items()}, other / "model.safetensors")
  with pytest.raises(ValueError, match="was trained on another base"):
    trained_model.open_model_dir(other, adapters=given)


@pytest.mark.parametrize(
  "command",
  [
    "chat base",
    "embed --model_dir base --input rows.txt --output vectors.npy",
    "export --model_dir base --output_dir saved",
    "infer --model_dir base --input rows.txt",
  ],
)
def test_commands_that_use_a_model_add_adapters(command, tmp_path, monkeypatch):
  def read_run(*given):
    raise SystemExit(f"read {given[0]} with {given[-1]}")

  monkeypatch.setattr(trained_model, "read_run", read_run)
  monkeypatch.chdir(tmp_path)
  (tmp_path / "rows.txt").write_text("a text\n")
  with pytest.raises(SystemExit, match=r"read base with \['a', 'b=2'\]"):
    cli.main([*command.split(), "--adapter", "a", "--adapter", "b=2"])
