"""The compiled programs of a served model: all are compiled at the start, for a few lengths."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import tree_leaves_with_path

from rosetta_t5 import decoding
from rosetta_t5.decoding import slots
from rosetta_t5.decoding.next_token import EndIds
from rosetta_t5.decoding.slots import SlotControls, SlotState, StepOutput
from rosetta_t5.inference.infer_fn import default_buckets
from rosetta_t5.models import DecoderOnlyModel
from rosetta_t5.trained_model import OpenedModel

PyTree = Any
Rows = list[
  jax.Array
]  # The model's arrays of some requests; each has a dimension for the requests.

BATCH_SIZES = (1, 4)  # The numbers of requests whose inputs are computed together.
NO_SLOT = np.iinfo(np.int32).max  # The slot of a row that only fills up a batch.


class Admission(NamedTuple):
  """Requests that join slots; all arrays have one row for each.

  Attributes:
    slots: [B] the slots.
    tokens: [B, T + 1] what the sequences begin with, followed by padding.
    position: [B] that of the token whose successor is computed first.
    start: [B] the first position that is generated.
    end: [B] the position after the last one that may be generated.
    controls: the controls of each.
  """

  slots: np.ndarray
  tokens: np.ndarray
  position: np.ndarray
  start: np.ndarray
  end: np.ndarray
  controls: SlotControls


class Programs:
  """The programs of a model's slots.

  The inputs of a request are computed once, at the shortest of a few lengths (`prefill`). Their arrays are put into a
  slot (`insert`), or are copied from a slot with the same inputs (`copy`). `step` advances all slots
  by one token. With an encoder, slots are as long as the longest input among them (`resize`).

  Attributes:
    num_slots: N, the number of slots.
    output_length: the maximum number of tokens that are generated.
    lengths: the lengths at which inputs are computed, in ascending order.
    slot_lengths: the lengths that slots can have.
    total_length: T, the number of positions of the decoder.
    is_decoder: whether the model has no encoder, so that sequences begin with the inputs.
    can_rewind: whether slots keep the arrays of all positions, so that another request can start from
      them. The caches of local layers do not.
  """

  def __init__(
    self,
    opened: OpenedModel,
    num_slots: int,
    input_length: int,
    output_length: int,
    eos_id: EndIds,
    controls: decoding.Controls,
  ):
    """Compiles all programs.

    Args:
      opened: the model.
      num_slots: the number of slots.
      input_length: the maximum number of tokens of the inputs.
      output_length: the maximum number of tokens that are generated.
      eos_id: the tokens that end a sequence.
      controls: those of all requests besides their own.
    """
    self._model, self._partitioner = opened.model, opened.partitioner
    self._params, self._params_axes = opened.state.params, opened.state_axes.params
    self._step_options: dict[str, Any] = {"eos_id": eos_id, "controls": controls}
    self.num_slots, self.output_length = num_slots, output_length
    self.is_decoder = isinstance(opened.model, DecoderOnlyModel)
    longest = input_length + self.is_decoder  # A decoder's inputs follow the start token.
    # An expert has fewer slots for shorter rows.
    buckets = () if opened.model.has_experts else default_buckets(longest)[::2]
    self.lengths = (*buckets, longest)
    self.total_length = output_length + self.is_decoder * longest
    # The cache of a decoder has room for the longest inputs.
    self.slot_lengths = self.lengths[-1:] if self.is_decoder else self.lengths
    self._find_dimensions()
    self._programs = self._compile()

  def _find_dimensions(self) -> None:
    """Finds the dimensions of the model's arrays that are the requests' and the inputs', by their shapes."""
    longest = self.lengths[-1]
    shapes, more_rows, longer = (
      jax.eval_shape(self._arrays, self._params, self.inputs([[]] * count, length))
      for count, length in ((2, longest), (3, longest), (2, longest + 8 * (not self.is_decoder)))
    )
    leaves = tree_leaves_with_path(shapes)
    self._treedef: Any = jax.tree.structure(shapes)
    row_axes, length_axes = (
      [_different_axis(x, y) for (_, x), y in zip(leaves, jax.tree.leaves(other), strict=True)]
      for other in (more_rows, longer)
    )
    # The positions of the slots replace the cache indices of the layers (`slots.with_index`).
    self._is_row = [
      axis is not None and path[-1].key not in slots.INDICES
      for (path, _), axis in zip(leaves, row_axes, strict=True)
    ]
    pairs = zip(row_axes, length_axes, self._is_row, strict=True)
    axes: Any = [(row, length) for row, length, is_row in pairs if is_row]
    self._axes: list[tuple[int, int | None]] = axes
    self._longest_rows, _ = self._split(shapes)
    caches = [x for path, x in leaves if path[-1].key == "cached_value"]
    self.can_rewind = not self.is_decoder or all(x.shape[-2] == self.total_length for x in caches)

  def inputs(self, rows: Sequence[Sequence[int]], length: int) -> dict[str, np.ndarray]:
    """Returns a batch of the model with the tokens of each row, which are at most `length`."""
    pad_id = self._model.pad_id
    if not self.is_decoder:
      targets = np.full((len(rows), self.total_length), pad_id, np.int32)
      inputs = padded(rows, length, pad_id)
      return {"encoder_input_tokens": inputs, "decoder_input_tokens": targets}
    is_input = np.arange(length)[None] < np.array([[len(row)] for row in rows])
    inputs = padded(rows, self.total_length, pad_id)
    return {"decoder_input_tokens": inputs, "decoder_causal_attention": is_input.astype(np.int32)}

  def _arrays(self, params: PyTree, batch: Any) -> dict[str, PyTree]:
    start = self._model.start_decoding(params, batch)
    precomputed = self._model.precompute(params, start)
    return {"cache": start.cache, "context": start.context, "precomputed": precomputed}

  def _split(self, arrays: PyTree) -> tuple[Rows, Rows]:
    """Returns the arrays that have a dimension for the requests, and the others."""
    pairs = list(zip(jax.tree.leaves(arrays), self._is_row, strict=True))
    return [x for x, is_row in pairs if is_row], [x for x, is_row in pairs if not is_row]

  def _join(self, rows: Rows, shared: Rows) -> PyTree:
    """Returns the tree of arrays that `_split` has split."""
    kinds = (iter(shared), iter(rows))
    return self._treedef.unflatten([next(kinds[is_row]) for is_row in self._is_row])

  def _resized(self, rows: Rows, change: int) -> Rows:
    """Returns rows of inputs that are longer, or shorter, by `change` positions of padding."""
    resized = []
    for x, (_, axis) in zip(rows, self._axes, strict=True):
      if axis is not None:
        pads = [(0, change if n == axis else 0, 0) for n in range(x.ndim)]
        x = jax.lax.pad(x, jnp.asarray(self._model.pad_id, x.dtype), pads)
      resized.append(x)
    return resized

  def _prefill(self, length: int, params: PyTree, batch: Any) -> Rows:
    rows, _ = self._split(self._arrays(params, batch))
    return self._resized(rows, self.lengths[-1] - length)

  def _insert(self, length: int, state: SlotState, rows: Rows, new: Admission) -> SlotState:
    rows = self._resized(rows, length - self.lengths[-1])
    put = lambda x, y, axis=0: x.at[(*[slice(None)] * axis, new.slots)].set(y, mode="drop")  # noqa: E731
    pairs = zip(state.rows, rows, self._axes, strict=True)
    return SlotState(
      tokens=put(state.tokens, new.tokens),
      position=put(state.position, new.position),
      start=put(state.start, new.start),
      end=put(state.end, new.end),
      controls=jax.tree.map(put, state.controls, new.controls),
      is_running=put(state.is_running, True),
      rows=[put(x, y, axis) for x, y, (axis, _) in pairs],
    )

  def _copy(self, length: int, state: SlotState, source_B: jax.Array, new: Admission) -> SlotState:
    rows = [
      jnp.take(x, source_B, axis) for x, (axis, _) in zip(state.rows, self._axes, strict=True)
    ]
    return self._insert(length, state, self._resized(rows, self.lengths[-1] - length), new)

  def _resize(self, change: int, state: SlotState) -> SlotState:
    return state.replace(rows=self._resized(state.rows, change))

  def _step(
    self, state: SlotState, params: PyTree, shared: Rows, is_kept_N: jax.Array
  ) -> tuple[SlotState, StepOutput]:
    arrays = self._join(state.rows, shared)
    has_layers = bool(getattr(self._model.module, "scan_layers", False))
    cache = slots.with_index(arrays["cache"], state.position, has_layers)
    next_logits = functools.partial(
      self._model.next_logits,
      params,
      length=self.total_length,
      context=arrays["context"],
      precomputed=arrays["precomputed"],
    )
    options = self._step_options
    state, cache, output = slots.step(state, is_kept_N, next_logits, cache, **options)
    rows, _ = self._split({**arrays, "cache": cache})
    return state.replace(rows=rows), output

  def _rows_shape(self, count: int, length: int) -> Rows:
    """Returns the shapes of the arrays of some requests with inputs of this length."""
    rows: Any = []
    for x, (row_axis, length_axis) in zip(self._longest_rows, self._axes, strict=True):
      shape = list(x.shape)
      shape[row_axis] = count
      if length_axis is not None:
        shape[length_axis] += length - self.lengths[-1]
      rows.append(jax.ShapeDtypeStruct(tuple(shape), x.dtype))
    return rows

  def _state_shape(self, length: int) -> SlotState:
    """Returns the shapes of slots for inputs of this length."""
    count = self.num_slots
    new = self.admission([NO_SLOT] * count, [[]] * count, [], [])
    _, *fields = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), new)
    is_running = jax.ShapeDtypeStruct((count,), bool)
    state: Any = (*fields, is_running, self._rows_shape(count, length))
    return SlotState(*state)

  def _compile(self) -> dict[Any, Callable[..., Any]]:
    """Returns the compiled programs, by name, length and number of requests."""
    partition, params, every = self._partitioner.partition, self._params, PartitionSpec()
    is_split = self.num_slots % self._partitioner.data_mesh_size == 0
    data = self._partitioner.data_partition_spec if is_split else every
    rows_axes = [PartitionSpec(*([None] * axis), *data) for axis, _ in self._axes]
    fields: Any = (*[data] * 6, rows_axes)
    state_axes = SlotState(*fields)
    states = {length: self._state_shape(length) for length in self.slot_lengths}
    with_params = (self._params_axes, every)
    get_shared = partition(
      lambda params, batch: self._split(self._arrays(params, batch))[1], with_params, every
    )
    self._shared = get_shared(params, self.inputs([[]], self.lengths[0]))
    shortest = states[self.slot_lengths[0]]
    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shortest)  # noqa: E731
    self.empty_state: Callable[[], SlotState] = partition(zeros, (), state_axes)
    # A function, the axes of its arguments and results, and the shapes of its arguments.
    programs: dict[Any, tuple[Any, Any, Any, tuple[Any, ...]]] = {}
    news = {n: self.admission([NO_SLOT] * n, [[]] * n, [], []) for n in BATCH_SIZES}
    for length, count in itertools.product(self.lengths, BATCH_SIZES):
      prefill, batch = functools.partial(self._prefill, length), self.inputs([[]] * count, length)
      programs["prefill", length, count] = prefill, with_params, every, (params, batch)
    three = (state_axes, every, every)
    for length, state in states.items():
      for count, new in news.items():
        insert: Any = functools.partial(self._insert, length)
        rows = self._rows_shape(count, self.lengths[-1])
        programs["insert", length, count] = insert, three, state_axes, (state, rows, new)
      copy, source = functools.partial(self._copy, length), np.zeros(1, np.int32)
      programs["copy", length] = copy, three, state_axes, (state, source, news[1])
      arguments = (state, params, self._shared, np.ones(self.num_slots, bool))
      axes = (state_axes, self._params_axes, every, every)
      programs["step", length] = self._step, axes, (state_axes, every), arguments
    for pair in itertools.pairwise(self.slot_lengths):
      for before, after in (pair, pair[::-1]):
        resize = functools.partial(self._resize, after - before)
        programs["resize", before, after] = resize, (state_axes,), state_axes, (states[before],)

    def compiled(program: tuple[Any, Any, Any, tuple[Any, ...]]) -> Callable[..., Any]:
      fn, in_axes, out_axes, arguments = program
      # Slots of another length do not fit into the memory of those before.
      donated = 0 if isinstance(arguments[0], SlotState) and len(arguments) > 1 else ()
      return partition(fn, in_axes, out_axes, donate_argnums=donated).compile(*arguments)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
      return dict(zip(programs, pool.map(compiled, programs.values()), strict=True))

  def admission(
    self,
    slots: Sequence[int],
    prefixes: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    controls: Sequence[Mapping[str, Any]],
  ) -> Admission:
    """Returns requests that join slots.

    Args:
      slots: the slot of each.
      prefixes: the tokens that the sequence of each begins with; none stands for a start token.
      max_tokens: the maximum number of tokens to generate; as many as fit for those that are missing.
      controls: those of each that differ from the defaults; the defaults for those that are missing.
    """
    count = len(slots)
    tokens = padded(prefixes, self.total_length + 1, self._model.pad_id)
    start = np.array([max(len(prefix), 1) for prefix in prefixes], np.int32)
    most = np.full(count, self.total_length, np.int32)
    most[: len(max_tokens)] = max_tokens
    fields = dataclasses.fields(SlotControls)
    own = {field.name: np.full(count, field.default) for field in fields}
    for row, given in enumerate(controls):
      for name, value in given.items():
        own[name][row] = value
    end = np.minimum(start + most, self.total_length + 1)
    slot = np.array(slots, np.int32)
    return Admission(slot, tokens, start - 1, start, end, SlotControls(**own))

  def prefill(self, inputs: Sequence[Sequence[int]]) -> Rows:
    """Returns the arrays of some requests, at most `BATCH_SIZES[-1]`.

    Args:
      inputs: the tokens of the inputs of each; with a decoder, those that sequences begin with.
    """
    count = next(n for n in BATCH_SIZES if n >= len(inputs))
    length = self.length_of(max(map(len, inputs)))
    rows = [*inputs, *[inputs[0]] * (count - len(inputs))]
    return self._programs["prefill", length, count](self._params, self.inputs(rows, length))

  def length_of(self, num_tokens: int) -> int:
    """Returns the shortest length of inputs that have so many tokens."""
    return next(length for length in self.lengths if length >= num_tokens)

  def insert(self, state: SlotState, length: int, rows: Rows, new: Admission) -> SlotState:
    """Returns slots of this length with the arrays of new requests."""
    return self._programs["insert", length, len(new.slots)](state, rows, new)

  def copy(self, state: SlotState, length: int, source: int, new: Admission) -> SlotState:
    """Returns slots of this length with a new request, whose arrays are those of the slot `source`."""
    return self._programs["copy", length](state, np.array([source], np.int32), new)

  def resize(self, state: SlotState, before: int, after: int) -> SlotState:
    """Returns slots of another length."""
    first, last = self.lengths.index(before), self.lengths.index(after)
    way = self.lengths[min(first, last) : max(first, last) + 1][:: 1 if first <= last else -1]
    for pair in itertools.pairwise(way):
      state = self._programs["resize", *pair](state)
    return state

  def step(
    self, state: SlotState, length: int, is_kept: np.ndarray
  ) -> tuple[SlotState, StepOutput]:
    """Returns slots of this length after one step, and its output; `is_kept` [N] as in `slots.step`."""
    result: tuple[SlotState, StepOutput] = self._programs["step", length](
      state, self._params, self._shared, is_kept
    )
    return result


def padded(rows: Sequence[Sequence[int]], length: int, pad_id: int) -> np.ndarray:
  """Returns rows of tokens as an array [B, length]."""
  array = np.full((len(rows), length), pad_id, np.int32)
  for target, row in zip(array, rows, strict=True):
    target[: len(row)] = row
  return array


def _different_axis(x: Any, y: Any) -> int | None:
  """Returns the dimension in which two shapes differ; None for equal shapes."""
  return next((n for n, (a, b) in enumerate(zip(x.shape, y.shape)) if a != b), None)  # noqa: B905
