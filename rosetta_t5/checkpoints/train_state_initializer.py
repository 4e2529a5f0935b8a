"""The initializer of train states, which computes them on the devices or restores them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax.core import freeze

from rosetta_t5 import terminal
from rosetta_t5.checkpoints.arrays.leafwise_init import LeafwiseFunction
from rosetta_t5.checkpoints.config import RestoreCheckpointConfig
from rosetta_t5.checkpoints.restore import (
  check_and_init_fallback_state,
  check_source_configs,
  check_vocabularies,
  create_orbax_checkpoint_manager,
  get_first_valid_restore_config_and_paths,
  restore,
)
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.parallel.partition_specs import partition_specs_of
from rosetta_t5.training.optimizers.optimizer_def import OptimizerDef
from rosetta_t5.training.train_state import InferenceState, TrainState


class TrainStateInitializer:
  """Knows a train state's shapes and sharding before the state exists (T5X's class).

  Attributes:
    global_train_state_shape: the train state with a ShapeDtypeStruct in place of each array.
    train_state_axes: the train state with a PartitionSpec in place of each array.
  """

  def __init__(
    self,
    optimizer_def: OptimizerDef | None,
    init_fn: Callable[..., Mapping[str, Any]],
    input_shapes: Mapping[str, Sequence[int]],
    partitioner: BasePartitioner,
    input_types: Mapping[str, Any] | None = None,
  ):
    """Traces the initialization without computing anything.

    Args:
      optimizer_def: the optimizer; None for an `InferenceState`, which has none.
      init_fn: `init_fn(rng, input_shapes, input_types)` returns the module's variables
        (`model.get_initial_variables`).
      input_shapes: the shape of each input of the model.
      partitioner: specifies how the state is sharded.
      input_types: the dtype of each input; None for the model's default.
    """
    self._partitioner = partitioner
    # T5X's notebooks give shapes as arrays.
    shapes = {name: tuple(int(size) for size in shape) for name, shape in input_shapes.items()}

    def init(rng: jax.Array) -> Any:
      variables = init_fn(rng=rng, input_shapes=shapes, input_types=input_types)
      variables = freeze(dict(variables))  # as in T5X, whose users call methods of FrozenDict
      if optimizer_def is None:
        return InferenceState.create(variables)
      return TrainState.create(optimizer_def, variables)

    self._init = init
    self._traced = LeafwiseFunction(init, jax.random.PRNGKey(0))
    self._from_scratch: Callable[[jax.Array], TrainState] | None = None
    self.global_train_state_shape: TrainState = self._traced.out_shape
    self.train_state_axes: TrainState = partition_specs_of(
      partitioner, self.global_train_state_shape
    )

  def from_scratch(self, init_rng: jax.Array) -> TrainState:
    """Returns a newly initialized train state, each shard computed on its device."""
    expected = self._traced.key
    if (init_rng.shape, init_rng.dtype) != (expected.shape, expected.dtype):
      self._traced, self._from_scratch = LeafwiseFunction(self._init, init_rng), None
    if self._from_scratch is None:
      self._from_scratch = self._traced.partition(self._partitioner, self.train_state_axes)
    with terminal.progress_bar("initializing the parameters"):
      return self._from_scratch(init_rng)

  def from_checkpoints(
    self,
    restore_cfgs: Sequence[RestoreCheckpointConfig],
    ds_iter: Any = None,
    init_rng: jax.Array | None = None,
  ) -> Iterator[tuple[TrainState, str]]:
    """Yields (train state, path) of each checkpoint of the first config that names any.

    Args:
      restore_cfgs: configs in order of preference.
      ds_iter: the iterator whose position is also restored if the config has restore_dataset = True.
      init_rng: for values that the checkpoint lacks, if the config allows that.
    """
    cfg, paths = get_first_valid_restore_config_and_paths(restore_cfgs)
    if cfg is None:
      return
    shapes = self.global_train_state_shape
    manager = create_orbax_checkpoint_manager(
      restore_cfg=cfg, train_state=shapes, partitioner=self._partitioner, ds_iter=ds_iter
    )
    fallback_state = check_and_init_fallback_state(
      manager, paths, cfg, shapes, self.from_scratch, init_rng
    )
    for path in paths:
      yield restore(manager, path, cfg, fallback_state), path

  def from_checkpoint(
    self,
    ckpt_cfgs: Sequence[RestoreCheckpointConfig],
    *,
    ds_iter: Any = None,
    init_rng: jax.Array | None = None,
  ) -> TrainState | None:
    """Returns the train state of the one checkpoint that `ckpt_cfgs` name, or None.

    Raises:
      ValueError: they name more than one.
    """
    _, paths = get_first_valid_restore_config_and_paths(ckpt_cfgs)
    if len(paths) > 1:
      raise ValueError(
        f"Expected at most 1 checkpoint, got {len(paths)}: {', '.join(paths[:5])}. Set "
        "RestoreCheckpointConfig.path to one of them and mode = 'specific'"
      )
    states = self.from_checkpoints(ckpt_cfgs, ds_iter=ds_iter, init_rng=init_rng)
    return next((state for state, _ in states), None)

  def from_checkpoint_or_scratch(
    self, ckpt_cfgs: Sequence[RestoreCheckpointConfig], *, init_rng: jax.Array, ds_iter: Any = None
  ) -> TrainState:
    """Returns the train state of `from_checkpoint`, or if there is none, of `from_scratch`."""
    state = self.from_checkpoint(ckpt_cfgs, ds_iter=ds_iter, init_rng=init_rng)
    return self.from_scratch(init_rng) if state is None else state


def restore_for_inference(
  model: Any,
  restore_cfg: RestoreCheckpointConfig,
  partitioner: BasePartitioner,
  task_feature_lengths: Mapping[str, int],
) -> tuple[Any, Any]:
  """Returns an `InferenceState` of one checkpoint, and the same with PartitionSpecs in place of arrays.

  Args:
    model: the model, whose vocabularies must be those of the checkpoint.
    restore_cfg: the checkpoint.
    partitioner: specifies how the parameters are sharded.
    task_feature_lengths: the lengths of the features.

  Raises:
    ValueError: there is no checkpoint, it belongs to another model, or the features are not the model's.
  """
  converter = model.FEATURE_CONVERTER_CLS(pack=False)
  if set(task_feature_lengths or ()) != set(converter.TASK_FEATURES):
    raise ValueError(
      f"The lengths of the training data must be those of {', '.join(converter.TASK_FEATURES)}, got "
      f"{task_feature_lengths} (task_feature_lengths)"
    )
  lengths = converter.get_model_feature_lengths(task_feature_lengths)
  initializer = TrainStateInitializer(
    optimizer_def=None,
    init_fn=model.get_initial_variables,
    input_shapes={name: (1, length) for name, length in lengths.items()},
    partitioner=partitioner,
  )
  check_vocabularies(model, restore_cfg)
  check_source_configs(model, restore_cfg)
  state = initializer.from_checkpoint([restore_cfg])
  if state is None:
    raise ValueError(
      f"There is no checkpoint in {restore_cfg.path} (mode = {restore_cfg.mode!r}): give another path "
      "(RestoreCheckpointConfig.path), or train first, with utils.CheckpointConfig.save"
    )
  return state, initializer.train_state_axes
