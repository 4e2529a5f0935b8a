"""Runs functions on the mesh: which part of which array lies on which device."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax.linen import partitioning as flax_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rosetta_t5.parallel.axis_rules import (
  LogicalAxisRules,
  rules_for,
  standard_logical_axis_rules,
)
from rosetta_t5.parallel.data_layout import DataLayout, check_batch_size, data_layout
from rosetta_t5.parallel.local_chunks import LocalChunker, LocalChunkInfo
from rosetta_t5.parallel.mesh import (
  BATCH_AXES,
  batch_shards,
  check_asked,
  default_mesh,
  mesh_reason,
  mesh_sizes,
)
from rosetta_t5.parallel.mesh_axes import DATA_AXIS, FSDP_AXIS

PyTree = Any


class PartitionedFunction:
  """A jitted function that is traced and run under its mesh and logical axis rules.

  T5X calls it PjittedFnWithContext; partitioners of one's own return it from `partition`.
  """

  def __init__(
    self,
    pjitted_fn: Any,
    partition_mesh: Mesh,
    logical_axis_rules: LogicalAxisRules = (),
    last_args: tuple[Any, ...] = (),
  ):
    """Wraps a function.

    Args:
      pjitted_fn: what `jax.jit` returned.
      partition_mesh: the mesh.
      logical_axis_rules: (logical axis, mesh axis) pairs.
      last_args: arguments that come after those of each call.
    """
    self._jitted = pjitted_fn
    self._mesh = partition_mesh
    self._rules = tuple((name, axis) for name, axis in logical_axis_rules)
    self._last_args = last_args

  @contextlib.contextmanager
  def _context(self) -> Iterator[None]:
    with jax.set_mesh(self._mesh), flax_partitioning.axis_rules(self._rules):
      yield

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    with self._context():
      return self._jitted(*args, *self._last_args, **kwargs)

  def lower(self, *args: Any, **kwargs: Any) -> Any:
    """Returns the function lowered for arguments of these shapes (see `jax.jit(f).lower`)."""
    with self._context():
      return self._jitted.lower(*args, *self._last_args, **kwargs)

  def compile(self, *args: Any) -> Callable[..., Any]:
    """Returns the function compiled for arguments of these shapes."""
    compiled, last_args = self.lower(*args).compile(), self._last_args
    return lambda *given: compiled(*given, *last_args)

  def bind_last(self, *last_args: Any) -> PartitionedFunction:
    """Returns the function with its last arguments given.

    They stay arguments of the compiled program: another value needs no other program.
    """
    return PartitionedFunction(self._jitted, self._mesh, self._rules, last_args)


class BasePartitioner(abc.ABC):
  """What a run asks of a partitioner (T5X: BasePartitioner); subclass it to place arrays otherwise.

  Attributes:
    num_partitions: devices that share one copy of the model.
  """

  def __init__(
    self,
    num_partitions: int | None = None,
    model_parallel_submesh: tuple[int, ...] | None = None,
    params_on_devices: bool = True,
    backend: str | None = None,
    ici_mesh_shape: tuple[int, ...] | None = None,
    dcn_mesh_shape: tuple[int, ...] | None = None,
    mesh: Mapping[str, int] | None = None,
  ):
    check_asked(num_partitions, model_parallel_submesh, ici_mesh_shape, dcn_mesh_shape, mesh)
    self._num_partitions = num_partitions or 1
    self._model_parallel_submesh = model_parallel_submesh or None
    self._params_on_devices = params_on_devices
    self._backend = backend
    self._ici_mesh_shape = ici_mesh_shape
    self._dcn_mesh_shape = dcn_mesh_shape
    self._counts = mesh or None
    self._mesh: Mesh | None = None

  @property
  def mesh(self) -> Mesh:
    """The mesh, made on first use so that a partitioner can be built before devices are touched."""
    if self._mesh is None:
      self._mesh = default_mesh(
        self._num_partitions,
        self._model_parallel_submesh,
        self._backend,
        self._ici_mesh_shape,
        self._dcn_mesh_shape,
        self._counts,
      )
    return self._mesh

  def mesh_shape(self, num_devices: int) -> dict[str, int]:
    """Returns the size of each axis that the mesh would have with so many devices; touches none.

    Raises:
      ValueError: they cannot be divided so.
    """
    return mesh_sizes(
      num_devices,
      self._num_partitions,
      self._model_parallel_submesh,
      self._ici_mesh_shape,
      self._dcn_mesh_shape,
      self._counts,
    )

  @property
  def mesh_reason(self) -> str:
    """Which of the partitioner's settings the mesh is made of."""
    shapes = (self._model_parallel_submesh, self._ici_mesh_shape, self._dcn_mesh_shape)
    return mesh_reason(self._num_partitions, *shapes, self._counts)

  @property
  def params_on_devices(self) -> bool:
    """Whether parameters stay on devices between steps; they always do here."""
    return self._params_on_devices

  @params_on_devices.setter
  def params_on_devices(self, value: bool) -> None:
    self._params_on_devices = value

  def move_params_to_devices(self, train_state: PyTree, train_state_axes: PyTree) -> PyTree:
    """Returns the state on the devices, each array split as `train_state_axes` says."""

    def place(spec: PartitionSpec | None, array: Any) -> Any:
      return jax.device_put(array, NamedSharding(self.mesh, spec or PartitionSpec()))

    return jax.tree.map(place, train_state_axes, train_state, is_leaf=_is_spec_or_none)

  @property
  def use_shardy_partitioner(self) -> bool:
    """Whether XLA's newer partitioner, Shardy, splits programs: jax's own choice."""
    return bool(getattr(jax.config, "jax_use_shardy_partitioner", True))

  @property
  def data_partition_spec(self) -> PartitionSpec:
    """How a batch is split: its first dimension over `data`, and `fsdp` where there is such an axis."""
    return PartitionSpec(BATCH_AXES if self._counts else DATA_AXIS)

  @property
  def data_mesh_size(self) -> int:
    """The number of parts that a batch is split in."""
    return batch_shards(self.mesh.shape)

  def get_data_layout(
    self, batch_size: int | None = None, host_index: int | None = None
  ) -> DataLayout:
    """Returns which part of a global batch the process `host_index` (default: this one) reads.

    Raises:
      ValueError: `batch_size` is not a multiple of `data_mesh_size`.
    """
    batch_size = self.data_mesh_size if batch_size is None else batch_size
    check_batch_size(batch_size, self.mesh.shape)
    return data_layout(self.mesh, batch_size, host_index)

  @property
  def data_shards(self) -> int:
    """How many parts the data is read in."""
    return self.get_data_layout().num_shards

  @property
  def data_shard_id(self) -> int:
    """Which of them this process reads."""
    return self.get_data_layout().shard_id

  @property
  def _local_chunker(self) -> LocalChunker:
    return LocalChunker(self.mesh)

  def get_local_chunk_info(
    self, global_shape: tuple[int, ...], mesh_axes: Sequence[str | None]
  ) -> LocalChunkInfo:
    """Returns which part of an array lies on this process's devices."""
    return self._local_chunker.get_local_chunk_info(global_shape, mesh_axes)

  def get_logical_axes(self, train_state: PyTree) -> PyTree:
    """Returns the state with logical axis names in place of arrays."""
    return train_state.as_logical_axes()

  @abc.abstractmethod
  def get_mesh_axes(self, train_state: PyTree) -> PyTree:
    """Returns the state with a PartitionSpec in place of each array."""

  @abc.abstractmethod
  def partition(
    self,
    fn: Callable[..., Any],
    in_axis_resources: PyTree,
    out_axis_resources: PyTree,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
  ) -> Any:
    """Returns `fn` compiled for the mesh, with the given splits of its arguments and results."""

  def compile(self, partitioned_fn: Any, *args: Any) -> Any:
    """Returns `partitioned_fn` compiled for arguments of these shapes, to be called as it is."""
    return partitioned_fn.compile(*args)


class BasePjitPartitioner(BasePartitioner):
  """A partitioner that compiles with jit for its mesh; a subclass says how the state is split (T5X)."""

  _rules: tuple[tuple[str, str | tuple[str, ...] | None], ...] = ()

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
      in_axis_resources: a PartitionSpec for each argument, or a tree (prefix) of them; None leaves
        the choice to the argument.
      out_axis_resources: the same for the results.
      static_argnums: arguments that are compiled in.
      donate_argnums: arguments whose memory the results may take.
    """
    jitted = jax.jit(
      fn,
      in_shardings=self._shardings(in_axis_resources),
      out_shardings=self._shardings(out_axis_resources),
      static_argnums=static_argnums,
      donate_argnums=donate_argnums,
    )
    return PartitionedFunction(jitted, self.mesh, self._rules)

  def _shardings(self, axis_resources: PyTree) -> PyTree:
    return jax.tree.map(
      lambda spec: NamedSharding(self.mesh, spec), axis_resources, is_leaf=_is_spec
    )


class PjitPartitioner(BasePjitPartitioner):
  """T5X's partitioner: logical axis rules on a mesh with the axes `data` and `model`."""

  def __init__(
    self,
    num_partitions: int | None = None,
    model_parallel_submesh: tuple[int, ...] | None = None,
    params_on_devices: bool = True,
    backend: str | None = None,
    ici_mesh_shape: tuple[int, ...] | None = None,
    dcn_mesh_shape: tuple[int, ...] | None = None,
    logical_axis_rules: LogicalAxisRules | None = None,
    mesh: Mapping[str, int] | None = None,
    zero1: bool = False,
    sequence_parallel: bool = False,
  ):
    """Builds a partitioner; see `default_mesh` for the mesh's arguments.

    Args:
      num_partitions: devices that share one copy of the model.
      model_parallel_submesh: T5X's TPU submesh; only its product counts.
      params_on_devices: kept for T5X's callers; parameters always stay on devices.
      backend: which backend's devices to take; None for the default one.
      ici_mesh_shape: (data, model) within one node.
      dcn_mesh_shape: (data, model) over nodes.
      logical_axis_rules: (logical axis, mesh axis) pairs; None for T5X's standard rules.
      mesh: {"data": …, "fsdp": …, "tensor": …} instead of all the above but the rules, which then
        split the batch over `fsdp` too, and parameters with their optimizer state's `embed`.
      zero1: whether the optimizer's state is split over `data` too, parameters not.
      sequence_parallel: whether activations between attention and feed-forward blocks are split by
        position over `model`, where heads and feed-forward units are.

    Raises:
      ValueError: no mesh is described, or two are.
    """
    super().__init__(
      num_partitions,
      model_parallel_submesh,
      params_on_devices,
      backend,
      ici_mesh_shape,
      dcn_mesh_shape,
      mesh,
    )
    rules = standard_logical_axis_rules() if logical_axis_rules is None else logical_axis_rules
    self._rules = rules_for(rules, FSDP_AXIS if mesh else None, sequence_parallel)
    self.zero1 = zero1
    self.sequence_parallel = sequence_parallel

  @property
  def logical_axis_rules(self) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
    """The (logical axis, mesh axis) pairs, in the order they are tried."""
    return self._rules

  def get_mesh_axes(self, train_state: PyTree) -> PyTree:
    """Returns the state with a PartitionSpec in place of each array; empty: on every device.

    Raises:
      ValueError: a logical axis has no rule.
    """
    names = self.get_logical_axes(train_state)
    axes = jax.tree.map(functools.partial(_to_mesh, self._rules), train_state, names)
    if not self.zero1 or not hasattr(train_state, "optimizer_def"):
      return axes
    to_mesh = functools.partial(_to_mesh_and_data, self._rules)
    states = jax.tree.map(to_mesh, train_state.param_states, names.param_states)
    return axes.replace(param_states=states)


def _to_mesh(rules: LogicalAxisRules, _: Any, axes: PartitionSpec | None) -> PartitionSpec:
  """Returns how an array with these logical axes is split."""
  if axes is None:
    return PartitionSpec()
  known = {rule[0] for rule in rules}
  unknown = [axis for axis in axes if axis is not None and axis not in known]
  if unknown:
    raise ValueError(
      f"logical axis {unknown[0]!r} has no rule: add ({unknown[0]!r}, None) or "
      f"({unknown[0]!r}, 'model') to PjitPartitioner.logical_axis_rules; known axes: "
      f"{', '.join(sorted(known))}"
    )
  return flax_partitioning.logical_to_mesh_axes(tuple(axes), rules) or PartitionSpec()


def _to_mesh_and_data(
  rules: LogicalAxisRules, array: Any, axes: PartitionSpec | None
) -> PartitionSpec:
  """Returns how an array of the optimizer's state is split under ZeRO-1: its `embed` over `data` too.

  `data` comes last: a device's part is then a slice of its part of the parameter, and what it made new
  of it is gathered over `data` alone. The other way round every state is sent elsewhere and back.
  """
  spec = _to_mesh(rules, array, axes)
  parts = [part if isinstance(part, tuple) else (part,) if part else () for part in spec]
  if axes is None or "embed" not in axes or any(DATA_AXIS in part for part in parts):
    return spec
  at = tuple(axes).index("embed")
  over = (*parts[at], DATA_AXIS)
  return PartitionSpec(*spec[:at], over if len(over) > 1 else DATA_AXIS, *spec[at + 1 :])


def _is_spec(leaf: Any) -> bool:
  return isinstance(leaf, PartitionSpec)


def _is_spec_or_none(leaf: Any) -> bool:
  return leaf is None or _is_spec(leaf)
