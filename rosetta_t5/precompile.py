"""Compiles the train step ahead of a run, and writes its HLO."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from rosetta_t5 import checkpoints, config, data, terminal
from rosetta_t5.argument_types import FolderName, Seed
from rosetta_t5.data.pipeline.datasets import as_batch_iterator
from rosetta_t5.models import BaseModel
from rosetta_t5.networks.kernel_measurement import with_measured_kernel
from rosetta_t5.networks.precision import choose_fp8, with_fp8
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.plan.description import describe_run
from rosetta_t5.training.trainer import lower_trainer_step


def precompile(
  *,
  model: BaseModel,
  train_dataset_cfg: data.DatasetConfig,
  partitioner: BasePartitioner,
  model_dir: FolderName,
  random_seed: Seed | None,
  get_dataset_fn: Callable[..., Any] = data.get_dataset,
  verify_matching_vocabs_fn: Callable[..., None] | None = data.verify_matching_vocabs,
  trainer_cls: Callable[..., Any] | None = None,
  te_config_cls: Any = None,
  use_hardware_rng: bool = False,
) -> None:
  """Lowers and compiles the train step, without initializing or reading parameters.

  The program is stored in jax's compilation cache (JAX_COMPILATION_CACHE_DIR), so that a run with the
  same trainer, model, batch and devices starts without compiling. Three files are written to
  MODEL_DIR: `lowered_hlo_pre_optimization` and `lowered_hlo_post_optimization` contain HLO as text,
  and `assignment` contains the device ids of the mesh in numpy's format.

  Args:
    model: the model.
    train_dataset_cfg: the training data, which determines the shapes of a batch.
    partitioner: shards arrays and computations over the devices.
    model_dir: the folder of the files.
    random_seed: the run's seed; None selects the random number generator of a run without a seed.
    get_dataset_fn: builds the training dataset.
    verify_matching_vocabs_fn: checks the vocabularies of task and model; None for no check.
    trainer_cls: builds the run's trainer, such as `trainer.Trainer` with a schedule bound; None for
      a trainer with a constant learning rate.
    te_config_cls: as in `train`: builds the `TransformerEngineConfig` that enables fp8; None for no
      fp8.
    use_hardware_rng: as in `train`, whose random number generator is part of the program.

  Raises:
    ValueError: the arguments do not fit together.
  """
  model = with_fp8(model, choose_fp8(te_config_cls))
  if use_hardware_rng or random_seed is None:
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
  if verify_matching_vocabs_fn is not None:
    verify_matching_vocabs_fn(train_dataset_cfg, model)
  layout = partitioner.get_data_layout(train_dataset_cfg.batch_size)
  shard = (layout.shard_id, layout.num_shards, model.FEATURE_CONVERTER_CLS)
  specs = as_batch_iterator(get_dataset_fn(train_dataset_cfg, *shard)).element_spec
  batch = {
    name: jax.ShapeDtypeStruct(
      (layout.batch_size, *x.shape[1:]), jax.dtypes.canonicalize_dtype(x.dtype)
    )
    for name, x in specs.items()
  }
  model, _ = with_measured_kernel(model, batch, partitioner.mesh.shape)
  initializer = checkpoints.TrainStateInitializer(
    optimizer_def=model.optimizer_def,
    init_fn=model.get_initial_variables,
    input_shapes={name: x.shape for name, x in batch.items()},
    input_types={name: x.dtype for name, x in batch.items()},
    partitioner=partitioner,
  )
  lowered = lower_trainer_step(
    trainer_cls,
    batch,
    is_training=True,
    model=model,
    train_state=initializer.global_train_state_shape,
    train_state_axes=initializer.train_state_axes,
    partitioner=partitioner,
    rng=jax.random.split(jax.random.PRNGKey(random_seed or 0), 2)[1],
  )
  with terminal.progress_bar("compiling the train step"):
    compiled = lowered.compile()
  if jax.process_index() == 0:
    folder = epath.Path(model_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lowered_hlo_pre_optimization").write_text(lowered.as_text(dialect="hlo"))
    (folder / "lowered_hlo_post_optimization").write_text(compiled.as_text())
    with (folder / "assignment").open("wb") as file:
      np.save(file, partitioner.mesh.device_ids)
    terminal.print_line(f"written  {folder}/lowered_hlo_*, {folder}/assignment")


def main(argv: Sequence[str] | None = None) -> None:
  """Runs `precompile` with the arguments of the command line and its gin files."""
  config.run_from_command_line(precompile, argv, describe_run)
