"""Runs a model's predictions or scores over a dataset: batched, sharded, every example once."""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rosetta_t5.inference.length_buckets import check_buckets, cut_rows
from rosetta_t5.parallel import BasePartitioner

PyTree = Any
Example = Mapping[str, np.ndarray]
InferFn = Callable[..., Any]

_PADDING = -1  # the index of a row that only fills the last batch
# Batches whose results are still on the devices: while one computes, the next is being read.
_IN_FLIGHT = 2


def get_infer_fn(
  infer_step: Callable[..., Any],
  batch_size: int,
  train_state_axes: Any,
  partitioner: BasePartitioner,
  keep_aux_as_numpy: bool = False,
  input_length_buckets: Sequence[int] | None = (),
  is_scoring: bool = False,
) -> InferFn:
  """Returns a function that runs `infer_step` over a whole dataset (T5X: get_infer_fn).

  Args:
    infer_step: `f(params, batch)` or `f(params, batch, rng)`, such as a model's `predict_batch`,
      `predict_batch_with_aux` or `score_batch`.
    batch_size: examples a batch, over all processes.
    train_state_axes: the train state with PartitionSpecs in place of arrays.
    partitioner: splits parameters and batches over the devices.
    keep_aux_as_numpy: leave auxiliary values as arrays, an array for each example.
    input_length_buckets: lengths that inputs are cut to where a batch has none that is longer, such
      as (64, 128, 256); see `cut_rows`. One program is compiled for each that occurs, and one for
      the full length; results are the same but for the last bits of sums.
    is_scoring: whether `infer_step` scores targets and decodes nothing, so that the buckets count
      for a decoder-only model's inputs and targets together.

  Returns:
    `f(ds, train_state, rng=None)`. `ds` yields (index, example) as `Dataset.enumerate()` does: the
    same on every process, of which each reads its share. The result, on every process, is a list
    of (index, output) in the order of the indices, outputs being numbers and nested lists; where
    `infer_step` returns (output, {name: array}), it is (that list, {name: list in the same order}).
    Results leave the devices batch by batch, so the dataset's size is bounded by the host alone.

  Raises:
    ValueError: the batch does not divide over the devices; from the function, `ds` is empty.
  """
  buckets = check_buckets(input_length_buckets)
  cut = functools.partial(cut_rows, buckets=buckets, is_scoring=is_scoring) if buckets else list
  layout = partitioner.get_data_layout(batch_size)
  data_spec, params_axes = partitioner.data_partition_spec, train_state_axes.params
  takes_rng = "rng" in inspect.signature(infer_step).parameters

  def step(params: PyTree, batch: PyTree, rng: jax.Array | None, index_B: jax.Array) -> PyTree:
    outputs = infer_step(params, batch, rng) if takes_rng else infer_step(params, batch)
    return index_B, outputs

  # Every process gets all results: the first writes them, the others may want to look.
  partitioned_step = partitioner.partition(
    step,
    in_axis_resources=(params_axes, data_spec, None, data_spec),
    out_axis_resources=PartitionSpec(),
  )
  sharding = NamedSharding(partitioner.mesh, data_spec)

  def to_devices(x: np.ndarray) -> jax.Array:
    global_shape = (batch_size, *x.shape[1:])
    return jax.make_array_from_process_local_data(sharding, x, global_shape)

  def infer_fn(ds: Iterable[Any], train_state: Any, rng: jax.Array | None = None) -> Any:
    rows = _Rows(keep_aux_as_numpy)
    in_flight: collections.deque[PyTree] = collections.deque()
    for index_B, batch in _batches(ds, batch_size, layout.shard_id, layout.num_shards, cut):
      step_rng = None
      if rng is not None:
        step_rng, rng = jax.random.split(rng)
      batch = jax.tree.map(to_devices, dict(batch))
      result = partitioned_step(train_state.params, batch, step_rng, to_devices(index_B))
      in_flight.append(jax.tree.map(_start_copy_to_host, result))
      if len(in_flight) > _IN_FLIGHT:
        rows.add(in_flight.popleft())
    for result in in_flight:
      rows.add(result)
    return rows.in_order()

  return infer_fn


def _batches(
  ds: Iterable[Any],
  batch_size: int,
  shard_id: int,
  num_shards: int,
  cut: Callable[[list[Any]], list[Any]] = list,
) -> Iterator[tuple[np.ndarray, Example]]:
  """Yields this shard's rows of each batch; the first example fills up the last one."""
  elements = iter(ds.as_numpy_iterator() if hasattr(ds, "as_numpy_iterator") else ds)
  filling: Any = None
  while group := list(itertools.islice(elements, batch_size)):
    filling = filling or (np.int64(_PADDING), group[0][1])
    group += [filling] * (batch_size - len(group))
    group = cut(group)  # before the shards part, as all must come to one length
    # As T5X shards: element n of the dataset goes to shard n modulo num_shards.
    indices, examples = zip(*group[shard_id::num_shards], strict=True)
    yield np.asarray(indices, np.int32), jax.tree.map(lambda *x: np.stack(x), *examples)


class _Rows:
  """Gathers the results of batches, row by row, without those that only filled the last batch."""

  def __init__(self, keep_aux_as_numpy: bool):
    self._keep_aux_as_numpy = keep_aux_as_numpy
    self._indices: list[int] = []
    self._outputs: list[Any] = []
    self._aux: PyTree = None

  def add(self, result: PyTree) -> None:
    index_B, outputs = jax.tree.map(np.asarray, result)
    kept = index_B != _PADDING
    self._indices += index_B[kept].tolist()
    outputs = jax.tree.map(lambda x: x[kept], outputs)
    if isinstance(outputs, tuple) and len(outputs) == 2 and isinstance(outputs[1], Mapping):
      outputs, aux = outputs
      aux = jax.tree.map(list if self._keep_aux_as_numpy else _as_lists, dict(aux))
      self._aux = aux if self._aux is None else join_aux(self._aux, aux)
    leaves, structure = jax.tree.flatten(outputs)
    rows = zip(*map(_as_lists, leaves), strict=True)
    self._outputs += [jax.tree.unflatten(structure, row) for row in rows]

  def in_order(self) -> Any:
    if not self._indices:
      raise ValueError(
        "there is no example to infer: the dataset is empty. Look at its split and files "
        "(utils.DatasetConfig), and at preprocessors that filter"
      )
    order = np.argsort(self._indices, kind="stable").tolist()
    pairs = [(self._indices[row], self._outputs[row]) for row in order]
    if self._aux is None:
      return pairs
    aux = jax.tree.map(
      lambda rows: [rows[row] for row in order], self._aux, is_leaf=lambda x: isinstance(x, list)
    )
    return pairs, aux


def join_aux(a: PyTree, b: PyTree) -> PyTree:
  """Returns auxiliary values, trees of lists, of the examples of a and then of b."""
  return jax.tree.map(lambda x, y: x + y, a, b, is_leaf=lambda x: isinstance(x, list))


def _start_copy_to_host(x: jax.Array) -> jax.Array:
  """Returns one of this process's copies of a replicated array, on its way to the host."""
  copy = x.addressable_data(0)
  copy.copy_to_host_async()
  return copy


def _as_lists(x: np.ndarray) -> list[Any]:
  # Numpy hands out the elements of bfloat16 as they are, which no JSON knows.
  return (x.astype(np.float32) if x.dtype == jnp.bfloat16 else x).tolist()
