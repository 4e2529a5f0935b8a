"""A train step that is compiled ahead of its run is found by the run and written as HLO."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from tiny_tasks import add_task, byte_model

from rosetta_t5 import checkpoints, data
from rosetta_t5.data.tensorflow_import import import_seqio
from rosetta_t5.networks.precision import TransformerEngineConfig
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.precompile import precompile
from rosetta_t5.training import Trainer

TASK = "pairs_to_compile_for"


@pytest.fixture
def programs(tmp_path):
  """A compilation cache for this test only."""
  before = (
    jax.config.jax_compilation_cache_dir,
    jax.config.jax_persistent_cache_min_compile_time_secs,
  )
  jax.config.update("jax_compilation_cache_dir", str(tmp_path / "programs"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  compilation_cache.reset_cache()
  yield tmp_path / "programs"
  jax.config.update("jax_compilation_cache_dir", before[0])
  jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])
  compilation_cache.reset_cache()


@pytest.mark.slow
def test_run_uses_the_precompiled_program_and_its_hlo_is_written(tmp_path, programs):
  add_task(TASK)
  partitioner = PjitPartitioner(num_partitions=2)
  cfg = data.DatasetConfig(
    TASK, {"inputs": 16, "targets": 12}, split="train", batch_size=8, shuffle=False, seed=0
  )
  model = byte_model()
  trainer_cls = functools.partial(
    Trainer, learning_rate_fn=lambda step: 0.1 / (step + 1.0), num_microbatches=2
  )
  precompile(
    model=model,
    train_dataset_cfg=cfg,
    partitioner=partitioner,
    model_dir=str(tmp_path / "out"),
    random_seed=0,
    trainer_cls=trainer_cls,
  )
  assert "HloModule" in (tmp_path / "out/lowered_hlo_pre_optimization").read_text()
  assert "fusion" in (tmp_path / "out/lowered_hlo_post_optimization").read_text()
  assignment = np.load(tmp_path / "out/assignment")
  np.testing.assert_array_equal(assignment, np.arange(8).reshape(4, 2))

  compiled = set(programs.iterdir())
  assert any("train_step" in path.name for path in compiled)
  dataset = data.get_dataset(cfg, 0, 1, model.FEATURE_CONVERTER_CLS)
  feed = data.prepare_train_iter(
    dataset,
    partitioner=partitioner,
    checkpoint_cfg=None,
    data_layout=partitioner.get_data_layout(8),
  )
  shapes = {name: x.shape for name, x in feed.element_spec.items()}
  initializer = checkpoints.TrainStateInitializer(
    model.optimizer_def, model.get_initial_variables, shapes, partitioner
  )
  trainer = trainer_cls(
    model=model,
    train_state=initializer.from_scratch(jax.random.PRNGKey(0)),
    partitioner=partitioner,
    eval_names=[],
    summary_dir=None,
    train_state_axes=initializer.train_state_axes,
    rng=jnp.array(jax.random.PRNGKey(1)),
  )
  trainer.compile_train(feed.element_spec)
  feed.close()
  import_seqio().TaskRegistry.remove(TASK)
  new = {path.name for path in set(programs.iterdir()) - compiled}
  assert not [name for name in new if "train_step" in name], "the step was compiled again"


@pytest.mark.slow
def test_a_step_in_fp8_is_precompiled_in_fp8(tmp_path, programs):
  add_task(TASK)
  precompile(
    model=byte_model(),
    train_dataset_cfg=data.DatasetConfig(
      TASK, {"inputs": 16, "targets": 12}, split="train", batch_size=8, shuffle=False, seed=0
    ),
    partitioner=PjitPartitioner(num_partitions=1),
    model_dir=str(tmp_path / "out"),
    random_seed=0,
    te_config_cls=TransformerEngineConfig(enabled=True, emulate=True),
  )
  import_seqio().TaskRegistry.remove(TASK)
  assert "f8e4m3fn[" in (tmp_path / "out/lowered_hlo_pre_optimization").read_text()
