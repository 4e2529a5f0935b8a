"""Predicts or scores each example of a dataset once, in batches that are sharded over the devices.

Batches of short inputs may be cut to one of a few lengths ("buckets"), each compiled once.
"""

import collections
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rosetta_t5.data.pipeline.datasets import check_ids
from rosetta_t5.models.batch_metrics import LEFT_BEHIND, fraction_left_behind
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.training.train_state import params_to_evaluate

PyTree = Any
Example = Mapping[str, np.ndarray]
Row = tuple[int, PyTree, PyTree]  # The index, the output, and the auxiliary values or None.
InferFn = Callable[..., Any]

PADDING = -1  # The index of a row that only fills up the last batch.
# The number of batches whose results are copied to the host while the next batch is computed.
_IN_FLIGHT = 2


def get_infer_fn(
  infer_step: Callable[..., Any],
  batch_size: int,
  train_state_axes: Any,
  partitioner: BasePartitioner,
  keep_aux_as_numpy: bool = False,
  input_length_buckets: Sequence[int] | None = (),
  is_scoring: bool = False,
  num_token_ids: int | None = None,
) -> InferFn:
  """Returns a function that runs `infer_step` over a whole dataset (T5X: get_infer_fn).

  Args:
    infer_step: `f(params, batch)` or `f(params, batch, rng)`, such as a model's `predict_batch`,
      `predict_batch_with_aux` or `score_batch`. If it has an argument `flax_mutables`, it also gets
      the train state's mutable collections.
    batch_size: number of examples in a batch, over all processes.
    train_state_axes: the train state with PartitionSpecs in place of arrays.
    partitioner: splits parameters and batches over the devices.
    keep_aux_as_numpy: whether to return auxiliary values as one array for each example.
    input_length_buckets: lengths such as (64, 128, 256). A batch is computed at the shortest of them
      that all its inputs fit into, else at the full length; see `cut_rows`. Each length that occurs
      is compiled once. The results are the same except for rounding errors of sums.
    is_scoring: whether `infer_step` scores targets instead of decoding; the buckets of a
      decoder-only model then apply to inputs and targets together.
    num_token_ids: how many token ids the model knows.

  Returns:
    `f(ds, train_state, rng=None)`. `ds` yields pairs (index, example), as `Dataset.enumerate()` does,
    the same on every process; each process reads its share of them. Every process gets the result:
    a list of (index, output), sorted by index, in which the outputs are numbers and nested lists. If
    `infer_step` returns (output, {name: array}), the result is (this list, {name: list in the same
    order}). Results are copied to the host batch by batch, so only the host's memory limits the
    size of the dataset.

  Raises:
    ValueError: the batch size is not divisible by the devices; from the function: `ds` is empty, or
      has a token id out of the model's range.
  """
  buckets = sorted(input_length_buckets or ())
  cut = functools.partial(cut_rows, buckets=buckets, is_scoring=is_scoring) if buckets else list
  layout = partitioner.get_data_layout(batch_size)
  data_spec = partitioner.data_partition_spec
  parameters = inspect.signature(infer_step).parameters
  takes_mutables = "flax_mutables" in parameters
  mutables_axes = train_state_axes.flax_mutables if takes_mutables else None

  def step(
    params: PyTree, batch: PyTree, rng: jax.Array | None, index_B: jax.Array, mutables: PyTree
  ) -> PyTree:
    options = {"flax_mutables": mutables} if takes_mutables else {}
    args = (params, batch, rng) if "rng" in parameters else (params, batch)
    return index_B, infer_step(*args, **options)

  in_axes = (train_state_axes.params, data_spec, None, data_spec, mutables_axes)
  # Every process gets all results: the first one writes them, the others may inspect them.
  partitioned_step = partitioner.partition(step, in_axes, PartitionSpec())
  sharding = NamedSharding(partitioner.mesh, data_spec)

  def to_devices(x: np.ndarray) -> jax.Array:
    global_shape = (batch_size, *x.shape[1:])
    return jax.make_array_from_process_local_data(sharding, x, global_shape)

  def infer_fn(ds: Iterable[Any], train_state: Any, rng: jax.Array | None = None) -> Any:
    rows: list[Row] = []
    params = params_to_evaluate(train_state)
    mutables = train_state.flax_mutables if takes_mutables else None
    in_flight: collections.deque[PyTree] = collections.deque()
    for index_B, batch in shard_batches(ds, batch_size, layout.shard_id, layout.num_shards, cut):
      check_ids(batch, f"the batch that begins with example {index_B[0]}", num_token_ids)
      step_rng = None
      if rng is not None:
        step_rng, rng = jax.random.split(rng)
      batch = jax.tree.map(to_devices, dict(batch))
      result = partitioned_step(params, batch, step_rng, to_devices(index_B), mutables)
      in_flight.append(jax.tree.map(_start_copy_to_host, result))
      if len(in_flight) > _IN_FLIGHT:
        rows += _unstack_result(in_flight.popleft(), keep_aux_as_numpy)
    for result in in_flight:
      rows += _unstack_result(result, keep_aux_as_numpy)
    return _in_order(rows)

  return infer_fn


def shard_batches(
  ds: Iterable[Any],
  batch_size: int,
  shard_id: int,
  num_shards: int,
  cut: Callable[[list[Any]], list[Any]] = list,
) -> Iterator[tuple[np.ndarray, Example]]:
  """Yields one shard's rows of each batch, as indices and stacked examples.

  The last batch is filled up with the first example and the index PADDING.

  Args:
    ds: pairs (index, example), the same on every process.
    batch_size: examples in a batch, over all shards.
    shard_id: which shard's rows to yield.
    num_shards: number of shards; as in T5X, example n belongs to shard n modulo `num_shards`.
    cut: shortens the features of a whole batch, so that all shards get the same length.
  """
  elements = iter(as_numpy(ds))
  filling: Any = None
  while group := list(itertools.islice(elements, batch_size)):
    filling = filling or (np.int64(PADDING), group[0][1])
    group = cut(group + [filling] * (batch_size - len(group)))
    indices, examples = zip(*group[shard_id::num_shards], strict=True)
    yield np.asarray(indices, np.int32), jax.tree.map(lambda *x: np.stack(x), *examples)


def as_numpy(ds: Iterable[Any]) -> Iterable[Any]:
  """Returns the elements of a dataset as numpy arrays."""
  return ds.as_numpy_iterator() if hasattr(ds, "as_numpy_iterator") else ds


def _unstack_result(result: PyTree, keep_aux_as_numpy: bool) -> list[Row]:
  """Splits a batch's results into rows, without the rows that fill up the last batch."""
  index_B, outputs = jax.tree.map(np.asarray, result)
  aux_rows: list[PyTree] = [None] * len(index_B)
  if isinstance(outputs, tuple) and len(outputs) == 2 and isinstance(outputs[1], Mapping):
    outputs, aux = outputs
    to_rows = list if keep_aux_as_numpy else array_to_lists
    aux_rows = [row for _, row in _unstack((index_B, dict(aux)), to_rows)]
  rows = zip(index_B.tolist(), _unstack(outputs, array_to_lists), aux_rows, strict=True)
  return [row for row in rows if row[0] != PADDING]


def _unstack(arrays: PyTree, to_rows: Callable[[np.ndarray], list[Any]]) -> list[PyTree]:
  """Splits a tree of arrays along the first axis into a list of trees."""
  leaves, structure = jax.tree.flatten(arrays)
  return [jax.tree.unflatten(structure, row) for row in zip(*map(to_rows, leaves), strict=True)]


def _in_order(rows: list[Row]) -> Any:
  """Sorts rows by index. Returns [(index, output)], and a tree of lists of auxiliary values if any."""
  if not rows:
    raise ValueError(
      "There is no example for inference: the dataset is empty. Check its files and split "
      "(--file and --split of eval, utils.DatasetConfig), and whether its preprocessors remove all examples"
    )
  indices, outputs, aux = zip(*sorted(rows, key=operator.itemgetter(0)), strict=True)
  pairs = list(zip(indices, outputs, strict=True))
  if aux[0] is None:
    return pairs
  return pairs, jax.tree.map(lambda *x: list(x), *aux, is_leaf=lambda x: isinstance(x, list))


def _start_copy_to_host(x: jax.Array) -> jax.Array:
  """Starts copying a replicated array to the host and returns this process's copy of it."""
  copy = x.addressable_data(0)
  copy.copy_to_host_async()
  return copy


def array_to_lists(x: np.ndarray) -> Any:
  """Returns an array as nested lists of Python numbers, also for bfloat16."""
  return (x.astype(np.float32) if x.dtype == jnp.bfloat16 else x).tolist()


def check_buckets(buckets: Sequence[int] | None, model: Any) -> tuple[int, ...]:
  """Returns the buckets, or () for None.

  Raises:
    ValueError: the model has experts, whose slots depend on the length.
  """
  if buckets and model.has_experts:
    raise ValueError(
      f"input_length_buckets = {buckets!r} would change the results of a model with experts, because an "
      "expert has fewer slots for shorter rows: set it to ()"
    )
  return tuple(buckets or ())


def default_buckets(full_length: int) -> tuple[int, ...]:
  """Returns an eighth, a quarter and a half of a length, as multiples of 8."""
  eighth = -(-full_length // 64) * 8
  return tuple(n * eighth for n in (1, 2, 4) if n * eighth < full_length)


def cut_rows(
  rows: Sequence[tuple[Any, Any]], buckets: Sequence[int], is_scoring: bool = False
) -> list[tuple[Any, Any]]:
  """Cuts the features of a batch to the shortest bucket that no example's content exceeds.

  For an encoder-decoder model, the inputs are cut. A decoder-only model has inputs and targets in one
  row. When they are scored, the whole row is cut. When the model continues the inputs, only
  `decoder_causal_attention`, which marks the inputs, is cut: the length of the row remains, because it
  limits the length of the prediction.

  Args:
    rows: (index, example) pairs; examples without these features are not changed.
    buckets: lengths in ascending order.
    is_scoring: whether targets are scored instead of decoded.
  """
  # The feature that determines the length, and the prefix of the features to cut.
  decoder = ("decoder_causal_attention", "decoder_causal_attention")
  if is_scoring:
    decoder = ("decoder_target_tokens", "decoder_")
  pairs = [("encoder_input_tokens", "encoder_"), decoder]
  measured, cut_prefix = next((pair for pair in pairs if pair[0] in rows[0][1]), ("", ""))
  if not measured:
    return list(rows)
  full_length = len(rows[0][1][measured])
  longest = max(len(np.trim_zeros(example[measured], "b")) for _, example in rows)
  bucket = next((n for n in buckets if longest <= n < full_length), full_length)

  def cut(name: str, x: np.ndarray) -> np.ndarray:
    return x[:bucket] if name.startswith(cut_prefix) and len(x) == full_length else x

  return [(i, {name: cut(name, x) for name, x in example.items()}) for i, example in rows]


def inference_step(model: Any, method: str) -> Callable[..., Any]:
  """Returns a model's method; with experts, one that also returns {LEFT_BEHIND: fraction by example}.

  Args:
    model: the model.
    method: `predict_batch`, `predict_batch_with_aux` (which returns it in any case) or `score_batch`.
  """
  if not model.has_experts:
    return getattr(model, method)

  def predict(params: Any, batch: Any, rng: Any = None) -> Any:
    predictions, aux = model.predict_batch_with_aux(params, batch, rng=rng)
    return predictions, {name: x for name, x in aux.items() if name == LEFT_BEHIND}

  def score(params: Any, batch: Any, return_intermediates: bool = False) -> Any:
    scores, intermediates = model.score_batch(params, batch, return_intermediates=True)
    return scores, intermediates if return_intermediates else fraction_left_behind(intermediates)

  return {"predict_batch": predict, "score_batch": score}.get(method) or getattr(model, method)


def notes_on_tokens_left_behind(aux: Mapping[str, Any]) -> list[str]:
  """Returns a note if experts had no slot for some tokens of these examples.

  Args:
    aux: the auxiliary values of the examples, {name: list}.
  """
  fractions = aux.get(LEFT_BEHIND, ())
  if not any(fractions):
    return []
  return [
    f"no expert computed {np.mean(fractions):.2%} of the tokens, because its slots were taken: set a "
    "higher eval_capacity_factor in the network's config"
  ]
