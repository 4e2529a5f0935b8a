"""The checkpoint that a run starts from: its own, the configured one, or none."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest

from rosetta_t5 import adapters, data
from rosetta_t5.checkpoints import (
  STARTED_FROM,
  VOCABULARIES,
  CheckpointConfig,
  CheckpointMismatchError,
  OrbaxCheckpointManagerInterface,
  RestoreCheckpointConfig,
  SaveCheckpointConfig,
  UnreadableCheckpointError,
  all_steps,
  check_model,
  create_checkpoint_manager_and_restore,
  create_orbax_checkpoint_manager,
  find_start_checkpoint,
  get_fallback_state,
  get_first_valid_restore_config_and_paths,
  read_run_facts,
  read_start_facts,
)
from rosetta_t5.checkpoints.arrays import lazy_arrays
from rosetta_t5.checkpoints.checkpoint_folders import ADAPTER
from rosetta_t5.data.tensorflow_import import import_seqio
from rosetta_t5.data.vocabularies.sentencepiece_models import train_sentencepiece

RNG = jax.random.PRNGKey(9)


@pytest.fixture
def pretrained(setup, tmp_path):
  folder = tmp_path / "pretrained"
  manager = setup.manager(folder)
  for step in (10, 20):
    manager.save(setup.state(step=step))
  manager.close()
  return folder


def begin(setup, model_dir, save=None, restore=None, ds_iter=None, run_facts=()):
  """Finds and restores the start checkpoint as a training run does."""
  cfg, path = find_start_checkpoint(CheckpointConfig(save, restore), model_dir)
  state, manager = create_checkpoint_manager_and_restore(
    setup.initializer,
    setup.partitioner,
    cfg,
    path,
    RNG,
    save_checkpoint_cfg=save,
    model_dir=model_dir,
    ds_iter=ds_iter,
  )
  if manager is not None:
    manager.begin_run(dict(run_facts))
  return state, manager


def test_a_run_without_any_checkpoint_starts_from_scratch(setup, tmp_path):
  state, manager = begin(setup, tmp_path, save=SaveCheckpointConfig(period=5))
  assert state is None
  assert manager.should_save(5)


def test_no_manager_is_created_if_nothing_is_saved_or_restored(setup, tmp_path):
  assert begin(setup, tmp_path) == (None, None)


def test_a_run_in_a_new_folder_does_not_change_the_checkpoint_it_started_from(
  setup, pretrained, tmp_path
):
  model_dir = tmp_path / "model"
  save = SaveCheckpointConfig(period=5, keep=1)
  state, manager = begin(setup, model_dir, save, RestoreCheckpointConfig(path=str(pretrained)))
  assert int(state.step) == 20
  for step in (20, 25):
    manager.save(state.replace_step(np.int32(step)))
  manager.close()
  assert all_steps(model_dir) == [25]
  assert all_steps(pretrained) == [10, 20]


def test_a_checkpoint_in_model_dir_is_preferred_to_the_configured_one(setup, pretrained, tmp_path):
  model_dir = tmp_path / "model"
  manager = setup.manager(model_dir)
  manager.save(setup.state(step=3))
  manager.close()
  state, _ = begin(setup, model_dir, restore=RestoreCheckpointConfig(path=str(pretrained)))
  assert int(state.step) == 3


def test_a_restart_has_the_runs_dtype_and_not_the_one_of_its_files(setup, pretrained, tmp_path):
  save = SaveCheckpointConfig("bfloat16", period=5)
  for number, dtype in enumerate((None, "bfloat16")):
    restore = RestoreCheckpointConfig(str(pretrained), dtype=dtype)
    for _ in range(2):  # the second time it is a restart
      state, manager = begin(setup, tmp_path / f"model_{number}", save, restore)
      assert {str(x.dtype) for x in jax.tree.leaves(state.params)} == {dtype or "float32"}
      manager.save(state)
      manager.close()


def test_the_mode_selects_the_latest_all_or_a_specific_checkpoint(pretrained):
  def paths(path, mode):
    return get_first_valid_restore_config_and_paths([RestoreCheckpointConfig(path, mode)])[1]

  ten, twenty = f"{pretrained}/checkpoint_10", f"{pretrained}/checkpoint_20"
  assert paths(str(pretrained), "latest") == (twenty,)
  assert paths(str(pretrained), "all") == (ten, twenty)
  assert paths(ten, "specific") == (ten,)
  assert paths([ten, twenty], "specific") == (ten, twenty)
  assert paths([], "latest") == ()
  assert paths("", "specific") == ()


def test_the_error_for_an_unknown_mode_suggests_a_similar_one():
  with pytest.raises(ValueError, match=r"got 'lattest' \(did you mean 'latest'\?\)"):
    RestoreCheckpointConfig(path="p", mode="lattest")


def test_an_empty_restore_path_means_a_start_from_scratch(tmp_path):
  start = find_start_checkpoint(
    CheckpointConfig(restore=RestoreCheckpointConfig(path=[])), tmp_path
  )
  assert start == (None, None)


def test_a_configured_folder_without_checkpoints_is_an_error(tmp_path):
  restore = RestoreCheckpointConfig(path=str(tmp_path / "typo"))
  with pytest.raises(
    ValueError,
    match=r"there is no checkpoint to restore in .*typo \(mode = 'latest'\): there is no such file or "
    r"folder\. Set RestoreCheckpointConfig\.path",
  ):
    find_start_checkpoint(CheckpointConfig(restore=restore), tmp_path)
  restore.fallback_to_scratch = True
  assert find_start_checkpoint(CheckpointConfig(restore=restore), tmp_path) == (None, None)


def test_the_error_for_a_checkpoint_in_mode_latest_suggests_mode_specific(pretrained, tmp_path):
  restore = RestoreCheckpointConfig(path=f"{pretrained}/checkpoint_10")
  with pytest.raises(ValueError, match=r"checkpoint_10 \(mode = 'latest'\).*or mode = 'specific'"):
    find_start_checkpoint(CheckpointConfig(restore=restore), tmp_path)


def test_the_error_for_a_folder_in_mode_specific_suggests_a_path(setup, pretrained, tmp_path):
  restore = RestoreCheckpointConfig(path=str(pretrained), mode="specific")
  with pytest.raises(ValueError, match=r"is a folder of checkpoints \(steps 10, 20\): give one"):
    begin(setup, tmp_path, restore=restore)


def test_training_from_several_checkpoints_is_an_error(pretrained, tmp_path):
  restore = RestoreCheckpointConfig(path=str(pretrained), mode="all")
  with pytest.raises(ValueError, match=r"names 2 checkpoints .*, but training starts from one"):
    find_start_checkpoint(CheckpointConfig(restore=restore), tmp_path)


def test_a_model_dir_of_another_model_is_an_error_and_is_not_changed(make_setup, setup, pretrained):
  wider = make_setup(module=type(setup.module)(width=32))
  with pytest.raises(
    CheckpointMismatchError, match=r"checkpoint_20 does not match this run's model"
  ):
    begin(wider, pretrained, save=SaveCheckpointConfig(period=1, keep=1))
  assert all_steps(pretrained) == [10, 20]


def test_the_fallback_state_provides_what_the_checkpoint_lacks(
  make_setup, setup, pretrained, tmp_path
):
  renamed = make_setup(module=type(setup.module)(out_name="wo_0"))
  restore = RestoreCheckpointConfig(str(pretrained), fallback_to_scratch=True, strict=False)
  state, _ = begin(renamed, tmp_path, restore=restore)
  scratch = renamed.initializer.from_scratch(RNG)
  np.testing.assert_array_equal(state.params["wo_0"], scratch.params["wo_0"])
  np.testing.assert_array_equal(state.params["wi"], setup.state().params["wi"])


def test_the_error_for_a_fallback_without_a_random_key_names_the_argument(setup):
  cfg = RestoreCheckpointConfig(path="p", fallback_to_scratch=True)
  with pytest.raises(ValueError, match=r"give fallback_init_rng"):
    get_fallback_state(cfg, setup.initializer.from_scratch, None)
  assert (
    get_fallback_state(RestoreCheckpointConfig("p"), setup.initializer.from_scratch, None) is None
  )


def test_a_resumed_run_continues_its_data_and_keeps_its_facts(setup, counter, tmp_path):
  save = SaveCheckpointConfig(period=1, save_dataset=True)
  _, manager = begin(setup, tmp_path, save, ds_iter=counter, run_facts={"random_seed": 5})
  for _ in range(3):
    next(counter)
  manager.save(setup.state(step=3))
  manager.close()
  fresh = type(counter)()
  state, _ = begin(setup, tmp_path, save, ds_iter=fresh, run_facts=read_run_facts(tmp_path))
  assert (int(state.step), fresh.position) == (3, 3)


def test_the_dataset_position_is_saved_and_restored_only_if_configured(setup, counter, tmp_path):
  _, manager = begin(setup, tmp_path, SaveCheckpointConfig(period=1), ds_iter=counter)
  manager.save(setup.state(step=1))
  manager.close()
  assert not (tmp_path / "checkpoint_1/dataset").exists()


def test_the_manager_class_and_its_settings_come_from_the_config(setup, tmp_path):
  class Mine(OrbaxCheckpointManagerInterface):
    pass

  save = SaveCheckpointConfig("bfloat16", 7, [3], 2, checkpoint_manager_cls=Mine)
  manager = create_orbax_checkpoint_manager(
    save_cfg=save,
    train_state=setup.initializer.global_train_state_shape,
    partitioner=setup.partitioner,
    model_dir=tmp_path,
  )
  assert isinstance(manager, Mine)
  assert [step for step in range(15) if manager.should_save(step)] == [0, 3, 7, 14]


def test_configs_have_the_fields_and_defaults_of_t5x():
  save, restore = SaveCheckpointConfig(), RestoreCheckpointConfig("p")
  assert (save.dtype, save.period, save.checkpoint_steps, save.keep) == (
    "float32",
    None,
    None,
    None,
  )
  assert (save.keep_dataset_checkpoints, save.save_dataset) == (None, False)
  assert (save.state_transformation_fns, restore.state_transformation_fns) == ([], ())
  assert (restore.mode, restore.strict, restore.fallback_to_scratch) == ("latest", True, False)
  assert (restore.dtype, restore.restore_dataset, restore.assignment_map) == (None, False, None)
  assert CheckpointConfig() == CheckpointConfig(save=None, restore=None)
  manager_classes = {save.checkpoint_manager_cls, restore.checkpoint_manager_cls}
  assert manager_classes == {OrbaxCheckpointManagerInterface}


def test_the_checkpoint_that_a_run_started_from_is_kept_also_after_a_restart(setup, pretrained):
  cfg = CheckpointConfig(save=SaveCheckpointConfig(period=1, keep=1))
  start = f"{pretrained}/checkpoint_20"
  for steps in ((21, 22), (23, 24)):  # the second time it is a restart
    _, path = find_start_checkpoint(cfg, pretrained)
    facts = {STARTED_FROM: start} | read_start_facts(pretrained, path)
    state, manager = begin(setup, pretrained, cfg.save, run_facts=facts)
    assert manager.restored_from == path
    for step in steps:
      manager.save(state.replace_step(np.int32(step)))
    manager.close()
    assert all_steps(pretrained) == [20, steps[-1]]


def test_a_damaged_latest_checkpoint_is_renamed_and_the_run_continues_from_the_older_one(
  setup, pretrained, caplog
):
  (pretrained / "checkpoint_20/state/manifest.ocdbt").write_bytes(b"cut off")
  state, manager = begin(setup, pretrained, save=SaveCheckpointConfig(period=10))
  assert int(state.step) == 10
  assert "checkpoint_20 cannot be read" in caplog.text
  assert "Older steps beside it: 10. It is renamed to" in caplog.text
  assert manager.all_steps() == [10]
  assert (pretrained / "damaged_checkpoint_20/state").is_dir()


def test_a_step_that_is_damaged_for_the_second_time_gets_another_name(setup, pretrained):
  (pretrained / "damaged_checkpoint_20").mkdir()
  (pretrained / "checkpoint_20/state/manifest.ocdbt").write_bytes(b"cut off")
  state, _ = begin(setup, pretrained, save=SaveCheckpointConfig(period=10))
  assert int(state.step) == 10
  (renamed,) = pretrained.glob("damaged_checkpoint_20_*/state")
  assert renamed.is_dir()


def test_a_damaged_checkpoint_in_another_folder_is_not_renamed(setup, pretrained, tmp_path):
  (pretrained / "checkpoint_20/state/manifest.ocdbt").write_bytes(b"cut off")
  with pytest.raises(UnreadableCheckpointError, match=r"Older steps beside it: 10"):
    begin(setup, tmp_path / "model", restore=RestoreCheckpointConfig(path=str(pretrained)))
  assert all_steps(pretrained) == [10, 20]


@pytest.mark.parametrize("damage", ["index", "values"])
def test_a_damaged_base_of_an_adapter_does_not_rename_the_run_s_checkpoints(
  setup, pretrained, tmp_path, damage, monkeypatch
):
  fact = {**adapters.LoRA().settings(), "base": f"{pretrained}/checkpoint_20"}
  fact |= {"base_parameters": ["target/wi"]}
  model_dir, save = tmp_path / "model", SaveCheckpointConfig(period=1)
  _, manager = begin(setup, model_dir, save, run_facts={ADAPTER: fact})
  for step in (1, 2):
    manager.save(setup.state(step=step))
  manager.close()
  if damage == "index":
    (pretrained / "checkpoint_20/state/manifest.ocdbt").write_bytes(b"cut off")
  else:

    def read(*_):
      raise ValueError("a chunk is cut off")

    monkeypatch.setattr(lazy_arrays, "start_device_transfer", read)
  with pytest.raises(
    ValueError, match=r"the base .*checkpoint_20 of the adapter in .*checkpoint_2"
  ):
    begin(setup, model_dir, save)
  assert all_steps(model_dir) == [1, 2]


def test_the_state_of_another_optimizer_is_initialized_with_fallback_to_scratch(
  setup, adam_setup, pretrained, tmp_path
):
  restore = RestoreCheckpointConfig(str(pretrained), fallback_to_scratch=True)
  state, _ = begin(adam_setup, tmp_path / "model", restore=restore)
  np.testing.assert_array_equal(state.params["wi"], setup.state().params["wi"])
  moments = state.state_dict()["state"]["param_states"]["0"]["mu"]["wi"]
  np.testing.assert_array_equal(moments, np.zeros_like(moments))
  assert int(state.step) == 20


def test_missing_fp8_state_is_initialized_and_unexpected_fp8_state_is_ignored(setup, tmp_path):
  fp8 = {
    "_overwrite_with_gradient": {
      "wi": {
        "input_scale": np.float32(5) * np.ones(1, np.float32),
        "input_amax_history": np.full(4, 7, np.float32),
      }
    }
  }
  bf16, with_fp8 = setup.state(step=1), setup.state(step=1).replace_flax_mutables(fp8)
  for name, state in (("bf16", bf16), ("fp8", with_fp8)):
    manager = setup.manager(tmp_path / name)
    manager.save(state)
    manager.close()
  assert setup.manager(tmp_path / "fp8").restore().flax_mutables == {}
  manager = OrbaxCheckpointManagerInterface(tmp_path / "bf16", with_fp8, setup.partitioner)
  fresh = manager.restore().flax_mutables["_overwrite_with_gradient"]["wi"]
  assert (fresh["input_scale"].tolist(), fresh["input_amax_history"].tolist()) == ([1], [0] * 4)
  manager = OrbaxCheckpointManagerInterface(tmp_path / "fp8", with_fp8, setup.partitioner)
  same = manager.restore().flax_mutables["_overwrite_with_gradient"]["wi"]
  assert (same["input_scale"].tolist(), same["input_amax_history"].tolist()) == ([5], [7] * 4)


def test_a_vocabulary_that_is_not_that_of_the_training_is_refused(setup, tmp_path):
  def model(*texts):
    files = [tmp_path / f"{number} {text}.model" for number, text in enumerate(texts)]
    for file, text in zip(files, texts, strict=True):
      file.write_bytes(train_sentencepiece([text] * 20, vocab_size=14))
    load = import_seqio().SentencePieceVocabulary
    sides = [load(str(file), extra_ids=number) for number, file in enumerate(files)]
    return types.SimpleNamespace(input_vocabulary=sides[0], output_vocabulary=sides[1])

  trained = model("one day a red fox", "one day a red fox")
  facts = {VOCABULARIES: data.vocabulary_digests(trained)}
  assert len(set(facts[VOCABULARIES].values())) == 1  # the extra ids of one side change nothing
  save = SaveCheckpointConfig(period=1)
  _, manager = begin(setup, tmp_path / "run", save, run_facts=facts)
  manager.save(setup.state(step=5))
  manager.close()
  cfg = RestoreCheckpointConfig(path=str(tmp_path / "run"))
  check_model(trained, data.vocabulary_digests(trained), cfg)
  check_model(trained, {}, cfg)
  other = model("one day a red fox", "one day a red cox")
  with pytest.raises(
    ValueError, match=r"vocabulary \(output\) is not .* \S+/run/checkpoint_5 was trained"
  ):
    check_model(other, data.vocabulary_digests(other), cfg)
