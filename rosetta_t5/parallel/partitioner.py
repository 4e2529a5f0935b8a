"""Partitioners: how arrays are split over the devices of a mesh, and how functions run on it."""

from __future__ import annotations

import abc
import contextlib
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rosetta_t5.argument_types import Positive
from rosetta_t5.parallel import axis_rules, data_layout
from rosetta_t5.parallel.mesh import DATA_AXIS, axis_names, count_batch_shards, mesh_config
from rosetta_t5.parallel.placement import PipelineSettings, use_placement

PyTree = Any

_PARAM_STATES = jax.tree_util.GetAttrKey("param_states")


class PartitionedFunction:
  """A jitted function that is traced and run under its mesh and logical axis rules.

  T5X calls it PjittedFnWithContext; users' partitioners return it from `partition`.
  """

  def __init__(
    self,
    pjitted_fn: Any,
    partition_mesh: Mesh,
    logical_axis_rules: axis_rules.LogicalAxisRules = (),
    last_args: tuple[Any, ...] = (),
    pipeline: PipelineSettings | None = None,
  ):
    """Wraps a function.

    Args:
      pjitted_fn: the result of `jax.jit`.
      partition_mesh: the mesh.
      logical_axis_rules: (logical axis, mesh axis) pairs.
      last_args: arguments that are appended to those of each call.
      pipeline: the settings of pipelines; None for the defaults.
    """
    self._jitted = pjitted_fn
    self._mesh = partition_mesh
    self._rules = tuple((name, axis) for name, axis in logical_axis_rules)
    self._last_args = last_args
    self._pipeline = pipeline or PipelineSettings()

  def _context(self) -> contextlib.AbstractContextManager[None]:
    return use_placement(self._mesh, self._rules, self._pipeline)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    with self._context():
      return self._jitted(*args, *self._last_args, **kwargs)

  def lower(self, *args: Any, **kwargs: Any) -> Any:
    """Returns the function lowered for arguments of these shapes (see `jax.jit(f).lower`)."""
    # Shapes are enough, and arrays may be on other devices than those of the mesh.
    last_args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._last_args)
    with self._context():
      return self._jitted.lower(*args, *last_args, **kwargs)

  def compile(self, *args: Any) -> Callable[..., Any]:
    """Returns the function compiled for arguments of these shapes; itself if JAX_DISABLE_JIT is set."""
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
      return self
    compiled, last_args = self.lower(*args).compile(), self._last_args
    return lambda *given: compiled(*given, *last_args)

  def bind_last(self, *last_args: Any) -> PartitionedFunction:
    """Returns the function with its last arguments bound.

    They remain arguments of the compiled program, so other values need no compilation.
    """
    return PartitionedFunction(self._jitted, self._mesh, self._rules, last_args, self._pipeline)


class BasePartitioner(abc.ABC):
  """The interface of a partitioner (T5X: BasePartitioner); subclass it to split arrays differently.

  Attributes:
    mesh_config: the axes of the mesh, and the settings that decide them. It needs no device.
    logical_axis_rules: the (logical axis, mesh axis) pairs, in the order in which they are tried.
    pipeline: the settings of pipelines.
  """

  logical_axis_rules: axis_rules.LogicalAxisRules = ()
  pipeline = PipelineSettings()

  def __init__(
    self,
    num_partitions: Positive | None = None,
    model_parallel_submesh: tuple[Positive, ...] | None = None,
    params_on_devices: bool = True,
    backend: str | None = None,
    ici_mesh_shape: tuple[int, ...] | None = None,
    dcn_mesh_shape: tuple[int, ...] | None = None,
    mesh: Mapping[str, int] | None = None,
    mesh_order: Sequence[str] = (),
  ):
    shapes = (model_parallel_submesh, ici_mesh_shape, dcn_mesh_shape)
    self.mesh_config = mesh_config(num_partitions, *shapes, mesh, mesh_order)
    self._mesh_order = mesh_order
    # T5X's names, which users' subclasses and notebooks read.
    self._num_partitions = num_partitions or 1
    self._model_parallel_submesh = model_parallel_submesh
    self._backend = backend
    self._devices: Sequence[Any] | None = None
    self.params_on_devices = params_on_devices  # T5X's setting; here they always stay on devices

  @functools.cached_property
  def mesh(self) -> Mesh:
    """The mesh. It is made on first use, so that building a partitioner does not touch any device.

    Raises:
      ValueError: the devices do not fit it, or this machine has none of the backend.
    """
    try:
      devices = self._devices or jax.devices(self._backend)
    except RuntimeError as error:
      hint = "" if self._backend is None else ". Set PjitPartitioner.backend = None"
      raise ValueError(f"{error}{hint}") from error
    return self.mesh_config.build(devices)

  def on_devices(self, devices: Sequence[Any]) -> BasePartitioner:
    """Returns a copy whose mesh has these devices, such as GPUs that this machine does not have."""
    return self._with(_devices=devices)

  def with_mesh(self, mesh: Mapping[str, int]) -> BasePartitioner:
    """Returns a copy with another mesh, {"data": …, "fsdp": …, "tensor": …}."""
    return self._with(mesh_config=mesh_config(mesh=mesh, mesh_order=self._mesh_order))

  def _with(self, **attributes: Any) -> BasePartitioner:
    changed = copy.copy(self)
    changed.__dict__.pop("mesh", None)
    changed.__dict__.update(attributes)
    return changed

  def move_params_to_devices(self, train_state: PyTree, train_state_axes: PyTree) -> PyTree:
    """Returns the state on the devices, each array split as `train_state_axes` specifies."""
    shardings = jax.tree.map(
      lambda spec: NamedSharding(self.mesh, spec or PartitionSpec()),
      train_state_axes,
      is_leaf=lambda x: x is None,
    )
    return jax.device_put(train_state, shardings)

  @property
  def use_shardy_partitioner(self) -> bool:
    """Whether XLA partitions programs with its newer partitioner, Shardy, as jax is configured."""
    return bool(getattr(jax.config, "jax_use_shardy_partitioner", True))

  @property
  def data_partition_spec(self) -> PartitionSpec:
    """The PartitionSpec of a batch, whose first dimension is split over the mesh's `BATCH_AXES`."""
    return PartitionSpec(self.mesh_config.batch_axes)

  @property
  def data_mesh_size(self) -> int:
    """The number of parts into which a batch is split."""
    return count_batch_shards(self.mesh.shape)

  def get_data_layout(
    self, batch_size: int | None = None, host_index: int | None = None
  ) -> data_layout.DataLayout:
    """Returns which part of a global batch the process `host_index` (default: this one) reads.

    Raises:
      ValueError: `batch_size` is not a multiple of `data_mesh_size`.
    """
    batch_size = self.data_mesh_size if batch_size is None else batch_size
    data_layout.check_batch_size(batch_size, self.mesh.shape)
    return data_layout.get_data_layout(self.mesh, batch_size, host_index)

  @property
  def data_shards(self) -> int:
    """The number of data shards."""
    return self.get_data_layout().num_shards

  @property
  def data_shard_id(self) -> int:
    """The data shard that this process reads."""
    return self.get_data_layout().shard_id

  @property
  def _local_chunker(self) -> data_layout.LocalChunker:
    return data_layout.LocalChunker(self.mesh)

  def get_local_chunk_info(
    self, global_shape: tuple[int, ...], mesh_axes: Sequence[str | None]
  ) -> data_layout.LocalChunkInfo:
    """Returns which part of an array is on this process's devices."""
    return self._local_chunker.get_local_chunk_info(global_shape, mesh_axes)

  def get_logical_axes(self, train_state: PyTree) -> PyTree:
    """Returns the state with logical axis names in place of arrays."""
    return train_state.as_logical_axes()

  @abc.abstractmethod
  def get_mesh_axes(self, train_state: PyTree) -> PyTree:
    """Returns the state with a PartitionSpec in place of each array."""

  def partition(
    self,
    fn: Callable[..., Any],
    in_axis_resources: PyTree,
    out_axis_resources: PyTree,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
  ) -> PartitionedFunction:
    """Returns `fn` jitted for the mesh.

    Args:
      fn: the function.
      in_axis_resources: a PartitionSpec for each argument, or a tree (prefix) of them; with None, the
        argument keeps its sharding.
      out_axis_resources: the same for the results.
      static_argnums: arguments that are compile-time constants.
      donate_argnums: arguments whose memory the results may reuse.
    """
    jitted = jax.jit(
      fn,
      in_shardings=self._shardings(in_axis_resources),
      out_shardings=self._shardings(out_axis_resources),
      static_argnums=static_argnums,
      donate_argnums=donate_argnums,
    )
    return PartitionedFunction(jitted, self.mesh, self.logical_axis_rules, pipeline=self.pipeline)

  def _shardings(self, axis_resources: PyTree) -> PyTree:
    return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), axis_resources)

  def compile(self, partitioned_fn: Any, *args: Any) -> Any:
    """Returns `partitioned_fn`, the result of `partition`, compiled for arguments of these shapes."""
    if isinstance(partitioned_fn, PartitionedFunction):
      return partitioned_fn.compile(*args)
    return partitioned_fn.lower(*args).compile()  # A subclass's `partition` may return a `jax.jit`.


class PjitPartitioner(BasePartitioner):
  """T5X's partitioner: logical axis rules on a mesh with the axes `data` and `model`."""

  def __init__(
    self,
    num_partitions: Positive | None = None,
    model_parallel_submesh: tuple[Positive, ...] | None = None,
    params_on_devices: bool = True,
    backend: str | None = None,
    ici_mesh_shape: tuple[int, ...] | None = None,
    dcn_mesh_shape: tuple[int, ...] | None = None,
    logical_axis_rules: axis_rules.LogicalAxisRules | None = None,
    mesh: Mapping[str, int] | None = None,
    zero1: bool = False,
    sequence_parallel: bool = False,
    pipeline_microbatches: Positive | None = None,
    pipeline_rounds: Positive = 1,
    mesh_order: Sequence[str] = (),
  ):
    """Builds a partitioner; `default_mesh` explains the arguments of the mesh.

    Args:
      num_partitions: the devices that share one copy of the model.
      model_parallel_submesh: T5X's TPU submesh; only the product of its sizes is used.
      params_on_devices: exists for T5X's callers; parameters always stay on devices.
      backend: the backend whose devices are used; None for the default one.
      ici_mesh_shape: (data, model) within one node.
      dcn_mesh_shape: (data, model) over nodes.
      logical_axis_rules: (logical axis, mesh axis) pairs; None for T5X's standard rules.
      mesh: {"pipeline": …, "data": …, "expert": …, "fsdp": …, "context": …, "tensor": …} in place of
        the other mesh arguments. `pipeline`, `data`, `expert` and `fsdp` split the batch, and `context`
        the positions of each row. `pipeline` also splits the layers, `expert` the experts of a layer,
        and `fsdp` and `context` the `embed` axis of the parameters and their optimizer state.
      zero1: whether the optimizer state, but not the parameters, is split over `data` too.
      sequence_parallel: whether activations between attention and feed-forward blocks are split by
        position over `model`, which splits heads and feed-forward units inside the blocks.
      pipeline_microbatches: see `PipelineSettings.microbatches`.
      pipeline_rounds: see `PipelineSettings.rounds`.
      mesh_order: the outermost axes of `mesh`; the others follow in the order pipeline, data, expert,
        fsdp, context, tensor. Outer axes span nodes, and the innermost ones are within a node.

    Raises:
      ValueError: no mesh is defined, or several are, or `mesh_order` is set without `mesh`.
    """
    shapes = (ici_mesh_shape, dcn_mesh_shape)
    super().__init__(
      num_partitions, model_parallel_submesh, params_on_devices, backend, *shapes, mesh, mesh_order
    )
    given = logical_axis_rules
    self._given_rules = axis_rules.standard_logical_axis_rules() if given is None else given
    self.zero1 = zero1
    self.sequence_parallel = sequence_parallel
    self.pipeline = PipelineSettings(pipeline_microbatches, pipeline_rounds)

  @property
  def logical_axis_rules(self) -> tuple[axis_rules.AxisRule, ...]:  # type: ignore[override]
    """The (logical axis, mesh axis) pairs, in the order in which they are tried."""
    axes, rules = self.mesh_config.axes, self._given_rules
    return axis_rules.extend_axis_rules(rules, axes, self.sequence_parallel)

  def get_mesh_axes(self, train_state: PyTree) -> PyTree:
    """Returns the state with a PartitionSpec in place of each array; an empty one replicates.

    Raises:
      ValueError: a logical axis has no rule.
    """
    logical_axes = self.get_logical_axes(train_state)
    axes_by_path = dict(jax.tree.leaves_with_path(logical_axes, is_leaf=_is_axis_names))
    rules = self.logical_axis_rules

    def spec_of(path: tuple[Any, ...], _: Any) -> PartitionSpec:
      axes = axes_by_path.get(path)
      spec = axis_rules.to_partition_spec(rules, axes)
      return _split_over_data(spec, axes) if self.zero1 and _PARAM_STATES in path else spec

    # By path, because the tree of names may lack parts, and its dicts may be frozen.
    return jax.tree_util.tree_map_with_path(spec_of, train_state)


def _is_axis_names(node: Any) -> bool:
  """Returns whether a node of a tree of logical axes is the names of one array's axes."""
  return type(node) is tuple and all(axis is None or isinstance(axis, str) for axis in node)


def _split_over_data(spec: PartitionSpec, axes: PartitionSpec | None) -> PartitionSpec:
  """Returns the PartitionSpec of an array of the optimizer state under ZeRO-1.

  Its axis `embed` is split over `data` too. `data` comes last: each device then updates a slice of its
  own part of the parameter, and the results are gathered over `data` alone. In the other order, every
  array would be sent to other devices and back.
  """
  parts = [axis_names(entry) for entry in spec]
  if axes is None or "embed" not in axes or any(DATA_AXIS in part for part in parts):
    return spec
  embed = tuple(axes).index("embed")
  split_over = (*parts[embed], DATA_AXIS) if parts[embed] else DATA_AXIS
  return PartitionSpec(*spec[:embed], split_over, *spec[embed + 1 :])
