"""The initializer of train states, which computes them leaf by leaf on the devices or restores them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax.core import freeze
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

from rosetta_t5 import terminal
from rosetta_t5.checkpoints import config
from rosetta_t5.checkpoints.manager import OrbaxCheckpointManagerInterface
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.parallel.axis_rules import partition_specs_of
from rosetta_t5.training.optimizers.optimizer_def import OptimizerDef
from rosetta_t5.training.train_state import InferenceState, TrainState

PyTree = Any

# A leaf that depends on most of the program (such as an initializer that uses data) has a large slice.
# If all slices together are at least this many times as long as the program, it runs as a whole.
_MAX_GROWTH = 4


def compile_leafwise(
  fn: Callable[[jax.Array], PyTree],
  traced: ClosedJaxpr,
  partitioner: BasePartitioner,
  out_axes: PyTree,
) -> Callable[[jax.Array], PyTree]:
  """Returns a function that computes each leaf of `fn(key)` by a program of its own, compiled once.

  Args:
    fn: a function of a random key.
    traced: its program.
    partitioner: compiles the programs.
    out_axes: the sharding of each leaf (PartitionSpecs).
  """
  program = traced.jaxpr
  slices = [_slice_for_output(program, output) for output in program.outvars]
  if sum(len(sliced.eqns) for sliced, _ in slices) >= _MAX_GROWTH * len(program.eqns):
    return partitioner.partition(fn, None, out_axes)
  specs, structure = jax.tree.flatten(out_axes)
  # Programs with equal text are equal, because jax numbers the variables in order of appearance.
  kinds = [(str(sliced), spec) for (sliced, _), spec in zip(slices, specs, strict=True)]
  compiled: dict[Any, Callable[..., jax.Array]] = {}
  for kind, (sliced, _) in zip(kinds, slices, strict=True):
    if kind not in compiled:
      function = jaxpr_as_fun(ClosedJaxpr(sliced, traced.consts))
      compiled[kind] = partitioner.partition(
        lambda key, folded, function=function: function(key, *folded)[0], None, kind[1]
      )

  def run(key: jax.Array) -> PyTree:
    leaves = [compiled[kind](key, folded) for kind, (_, folded) in zip(kinds, slices, strict=True)]
    return jax.tree.unflatten(structure, leaves)

  return run


def _slice_for_output(program: Jaxpr, output: Any) -> tuple[Jaxpr, tuple[np.ndarray, ...]]:
  """Returns the part of a program that computes `output`, and the constants that it folds into the key.

  The constants are arguments of the part, so that two modules with equal initializers have equal programs.
  """
  needed = {variable for variable in [output] if isinstance(variable, Var)}
  equations, folded_inputs, folded = [], [], []
  for eqn in reversed(program.eqns):
    if needed.isdisjoint(eqn.outvars):
      continue
    needed.update(variable for variable in eqn.invars if isinstance(variable, Var))
    if eqn.primitive.name == "random_fold_in" and isinstance(constant := eqn.invars[1], Literal):
      aval: Any = constant.aval
      folded_inputs.append(Var(aval))
      folded.append(np.asarray(constant.val, aval.dtype))
      eqn = eqn.replace(invars=[eqn.invars[0], folded_inputs[-1]])
    equations.append(eqn)
  inputs = [*program.invars, *folded_inputs]
  debug_info = program.debug_info.with_unknown_names()
  sliced = Jaxpr(program.constvars, inputs, [output], equations[::-1], debug_info=debug_info)
  return sliced, tuple(folded)


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

    self._init, key = init, jax.random.PRNGKey(0)
    self._traced, self.global_train_state_shape = jax.make_jaxpr(init, return_shape=True)(key)
    self._from_scratch: Callable[[jax.Array], TrainState] | None = None
    self.train_state_axes = partition_specs_of(partitioner, self.global_train_state_shape)

  def from_scratch(self, init_rng: jax.Array) -> TrainState:
    """Returns a newly initialized train state, each shard computed on its device."""
    if self._from_scratch is None:
      expected = self._traced.in_avals[0]
      if (init_rng.shape, init_rng.dtype) != (expected.shape, expected.dtype):
        self._traced = jax.make_jaxpr(self._init)(init_rng)
      self._from_scratch = compile_leafwise(
        self._init, self._traced, self._partitioner, self.train_state_axes
      )
    with terminal.progress_bar("initializing the parameters"):
      return self._from_scratch(init_rng)

  def from_checkpoints(
    self,
    restore_cfgs: Sequence[config.RestoreCheckpointConfig],
    ds_iter: Any = None,
    init_rng: jax.Array | None = None,
  ) -> Iterator[tuple[TrainState, str]]:
    """Yields (train state, path) of each checkpoint of the first config that names any.

    Args:
      restore_cfgs: configs in order of preference.
      ds_iter: the iterator whose position is also restored if the config has restore_dataset = True.
      init_rng: for values that the checkpoint lacks, if the config allows that.
    """
    cfg, paths = config.get_first_valid_restore_config_and_paths(restore_cfgs)
    if cfg is None:
      return
    manager = config.create_orbax_checkpoint_manager(
      restore_cfg=cfg,
      train_state=self.global_train_state_shape,
      partitioner=self._partitioner,
      ds_iter=ds_iter,
    )
    fallback_state = get_fallback_state(cfg, self.from_scratch, init_rng)
    for path in paths:
      yield restore(manager, path, cfg, fallback_state), path

  def from_checkpoint(
    self,
    ckpt_cfgs: Sequence[config.RestoreCheckpointConfig],
    *,
    ds_iter: Any = None,
    init_rng: jax.Array | None = None,
  ) -> TrainState | None:
    """Returns the train state of the one checkpoint that `ckpt_cfgs` name, or None.

    Raises:
      ValueError: they name more than one.
    """
    _, paths = config.get_first_valid_restore_config_and_paths(ckpt_cfgs)
    if len(paths) > 1:
      raise ValueError(
        f"Expected at most 1 checkpoint, got {len(paths)}: {', '.join(paths[:5])}. Set one path, and "
        "RestoreCheckpointConfig.mode to 'specific', or to 'latest' and the folder that contains it"
      )
    states = self.from_checkpoints(ckpt_cfgs, ds_iter=ds_iter, init_rng=init_rng)
    return next((state for state, _ in states), None)

  def from_checkpoint_or_scratch(
    self,
    ckpt_cfgs: Sequence[config.RestoreCheckpointConfig],
    *,
    init_rng: jax.Array,
    ds_iter: Any = None,
  ) -> TrainState:
    """Returns the train state of `from_checkpoint`, or if there is none, of `from_scratch`."""
    state = self.from_checkpoint(ckpt_cfgs, ds_iter=ds_iter, init_rng=init_rng)
    return self.from_scratch(init_rng) if state is None else state


def restore(
  checkpoint_manager: OrbaxCheckpointManagerInterface,
  paths: str | Sequence[str],
  restore_cfg: config.RestoreCheckpointConfig,
  fallback_state: Mapping[str, Any] | None = None,
) -> Any:
  """Returns the train state of the checkpoint at `paths`, or a list of states for several paths.

  Args:
    checkpoint_manager: the manager, which knows the train state's shapes and sharding.
    paths: one path, or several.
    fallback_state: nested state dict that provides what the checkpoint lacks.
  """
  options: dict[str, Any] = {
    "fallback_state": fallback_state,
    "state_transformation_fns": restore_cfg.state_transformation_fns,
  }
  given = [paths] if isinstance(paths, str) else paths
  states = [checkpoint_manager.restore(path=path, **options) for path in given]
  return states[0] if len(states) == 1 else states


def get_fallback_state(
  restore_cfg: config.RestoreCheckpointConfig | None,
  init_fn: Callable[[jax.Array], TrainState],
  init_rng: jax.Array | None,
) -> dict[str, Any] | None:
  """Returns a newly initialized state dict if `restore_cfg` allows a fallback to one, else None.

  Raises:
    ValueError: a fallback is allowed, but `init_rng` is None.
  """
  if restore_cfg is None or not restore_cfg.fallback_to_scratch:
    return None
  if init_rng is None:
    raise ValueError(
      "RestoreCheckpointConfig.fallback_to_scratch = True needs a random key: give fallback_init_rng"
    )
  return init_fn(init_rng).state_dict()
