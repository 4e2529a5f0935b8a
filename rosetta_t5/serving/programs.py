"""The compiled programs of a served model: all are compiled at the start, for a few lengths of inputs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
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
from rosetta_t5.models import DecoderOnlyModel, EncoderModel
from rosetta_t5.trained_model import OpenedModel

PyTree = Any

BATCH_SIZES = (1, 4)  # The numbers of requests whose inputs are computed together.
NUM_BEAMS = 4
CALLS = ("beams", "score", "attention", "embed")
_NO_SLOT = np.iinfo(np.int32).max  # That of a request which only fills up a batch.


class Task(NamedTuple):
  """What a slot computes.

  Attributes:
    inputs: the tokens of the inputs; with a decoder, those that the sequence begins with.
    max_tokens: the maximum number of tokens to generate.
    controls: how they are chosen.
  """

  inputs: tuple[int, ...]
  max_tokens: int
  controls: SlotControls


class Programs:
  """The programs of a model, with the state of its slots.

  The inputs of a task are computed once, at the shortest of a few lengths, and put into a slot (`admit`), or
  are copied from a slot with the same inputs (`copy`). `step` advances all slots by one token. Slots have
  room for the longest inputs; a step reads as much of them as the longest of its inputs needs.

  Attributes:
    num_slots: N, the number of slots.
    output_length: the maximum number of tokens that are generated.
    lengths: the lengths of inputs for which there are programs, in ascending order.
    is_decoder: whether the model has no encoder, so that sequences begin with the inputs.
    can_rewind: whether slots keep the arrays of all positions, so that another task can start from
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
    calls: Collection[str] = CALLS,
  ):
    """Compiles all programs.

    Args:
      opened: the model, whose decode function is beam search.
      num_slots: the number of slots.
      input_length: the maximum number of tokens of the inputs.
      output_length: the maximum number of tokens that are generated.
      eos_id: the tokens that end a sequence.
      controls: those of all tasks besides their own.
      calls: the methods of `call` that are compiled.
    """
    self._model, self._params = opened.model, opened.state.params
    self._eos_id, self._controls = eos_id, controls
    self.num_slots, self.output_length = num_slots, output_length
    self.is_decoder = isinstance(opened.model, DecoderOnlyModel)
    longest = input_length + self.is_decoder  # A decoder's inputs follow the start token.
    # An expert has fewer slots for shorter rows.
    buckets = () if opened.model.has_experts else default_buckets(longest)[::2]
    self.lengths = (*buckets, longest)
    # A decoder's sequence has room for the longest inputs.
    self._total_length = output_length + self.is_decoder * longest
    self._find_axes()
    self._compile(opened, calls)

  def _find_axes(self) -> None:
    """Finds the dimensions of the model's arrays that are the tasks' and the inputs', by their shapes."""
    arrays, other = (
      jax.eval_shape(self._arrays, self._params, self._batch([((), ())] * count, length))
      for count, length in (
        (2, self.lengths[-1]),
        (3, self.lengths[-1] + 8 * (not self.is_decoder)),
      )
    )
    self._treedef: Any = jax.tree.structure(arrays)
    leaves = tree_leaves_with_path(arrays)
    # For each array the dimension of the tasks, None for arrays that all tasks share, and that of the
    # inputs, None for arrays that do not have it.
    self._axes: list[tuple[int | None, int | None]] = []
    for (path, x), y in zip(leaves, jax.tree.leaves(other), strict=True):
      changes = enumerate(zip(x.shape, y.shape, strict=True))
      kinds = {(a, b) == (2, 3): axis for axis, (a, b) in changes if a != b}
      # The positions of the slots replace the cache indices of the layers (`slots.with_index`).
      is_index = path[-1].key in slots.INDICES
      self._axes.append((None if is_index else kinds.get(True), kinds.get(False)))
    caches = [x for path, x in leaves if path[-1].key == "cached_value"]
    self.can_rewind = not self.is_decoder or all(x.shape[-2] == self._total_length for x in caches)

  def _batch(
    self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], length: int
  ) -> dict[str, np.ndarray]:
    """Returns a batch of the model with inputs of at most `length` tokens, and targets."""
    pad_id, total = self._model.pad_id, self._total_length
    inputs, targets = zip(*rows, strict=True)
    if not self.is_decoder:
      return {
        "encoder_input_tokens": padded(inputs, length, pad_id),
        "decoder_input_tokens": padded([(pad_id, *x[:-1]) for x in targets], total, pad_id),
        "decoder_target_tokens": padded(targets, total, pad_id),
      }
    tokens = padded([(*x, *y) for x, y in rows], total + 1, pad_id)
    is_input = np.arange(length)[None] < np.array([[len(x)] for x in inputs])
    return {
      "decoder_input_tokens": tokens[:, :-1],
      "decoder_target_tokens": tokens[:, 1:],
      "decoder_causal_attention": is_input.astype(np.int32),
    }

  def _arrays(self, params: PyTree, batch: Any) -> dict[str, PyTree]:
    start = self._model.start_decoding(params, batch)
    return {"cache": start.cache, "others": self._model.step_arrays(params, start)}

  def _new(self, tasks: Sequence[Task]) -> SlotState:
    """Returns the state of tasks that begin, without the model's arrays."""
    prefixes = [task.inputs if self.is_decoder else () for task in tasks]
    start = np.array([max(len(prefix), 1) for prefix in prefixes], np.int32)
    most = np.array([task.max_tokens for task in tasks], np.int32)
    stack = lambda default, *own: np.array(own, default.dtype)  # noqa: E731
    return SlotState(
      tokens=padded(prefixes, self._total_length + 1, self._model.pad_id),
      position=start - 1,
      start=start,
      end=np.minimum(start + most, self._total_length + 1),
      controls=jax.tree.map(stack, SlotControls(), *(task.controls for task in tasks)),
      is_running=np.ones(len(tasks), bool),
    )

  def _empty(self, params: PyTree) -> SlotState:
    """Returns slots without tasks."""
    arrays = jax.tree.leaves(self._arrays(params, self._batch([((), ())], self.lengths[-1])))
    for index, (axis, _) in enumerate(self._axes):
      if axis is not None:
        shape = list(arrays[index].shape)
        shape[axis] = self.num_slots
        arrays[index] = jnp.zeros(shape, arrays[index].dtype)
    new = jax.tree.map(jnp.asarray, self._new([_NO_TASK] * self.num_slots))
    return new.replace(is_running=jnp.zeros(self.num_slots, bool), arrays=arrays)

  def _put(
    self, state: SlotState, slots_B: jax.Array, new: SlotState, arrays: Sequence[jax.Array]
  ) -> SlotState:
    """Returns slots with the state and the arrays of new tasks."""

    def put(x: jax.Array, y: jax.Array, axis: int = 0) -> jax.Array:
      return x.at[(*[slice(None)] * axis, slots_B)].set(y, mode="drop")

    def put_array(
      x: jax.Array, y: jax.Array, axis: int | None, length_axis: int | None
    ) -> jax.Array:
      if axis is None:
        return x
      if length_axis is not None:
        missing = x.shape[length_axis] - y.shape[length_axis]
        widths = [(0, missing * (n == length_axis)) for n in range(y.ndim)]
        y = jnp.pad(y, widths, constant_values=self._model.pad_id)
      return put(x, y, axis)

    fields = jax.tree.map(put, state.replace(arrays=()), new)
    triples = zip(state.arrays, arrays, self._axes, strict=True)
    return fields.replace(arrays=[put_array(x, y, *axes) for x, y, axes in triples])

  def _admit(
    self, state: SlotState, params: PyTree, batch: Any, slots_B: jax.Array, new: SlotState
  ) -> SlotState:
    return self._put(state, slots_B, new, jax.tree.leaves(self._arrays(params, batch)))

  def _copy(
    self, state: SlotState, source_1: jax.Array, slots_1: jax.Array, new: SlotState
  ) -> SlotState:
    pairs = zip(state.arrays, self._axes, strict=True)
    arrays = [x if axis is None else jnp.take(x, source_1, axis) for x, (axis, _) in pairs]
    return self._put(state, slots_1, new, arrays)

  def _step(
    self, length: int, state: SlotState, params: PyTree, is_kept_N: jax.Array
  ) -> tuple[SlotState, StepOutput]:
    unread, read = self.lengths[-1] - length, list(state.arrays)
    for index, (_, axis) in enumerate(self._axes):
      if axis is not None:
        x = read[index]
        read[index] = jax.lax.slice_in_dim(x, 0, x.shape[axis] - unread, axis=axis)
    arrays = self._treedef.unflatten(read)
    has_layers = bool(getattr(self._model.module, "scan_layers", False))
    cache = slots.with_index(arrays["cache"], state.position, has_layers)
    next_logits = functools.partial(
      self._model.next_logits, params, self._total_length, arrays["others"]
    )
    shared: Any = (self._eos_id, self._controls)
    new, cache, output = slots.step(state, is_kept_N, next_logits, cache, *shared)
    # A step writes only arrays that all lengths share.
    written = zip(
      state.arrays, jax.tree.leaves({**arrays, "cache": cache}), self._axes, strict=True
    )
    kept = [x if axes[0] is None or axes[1] is not None else y for x, y, axes in written]
    return new.replace(arrays=kept), output

  def _beams(self, params: PyTree, batch: Any) -> tuple[jax.Array, jax.Array]:
    limits = {"eos_id": self._eos_id, "max_decode_step": self.output_length}
    options: Any = {"num_decodes": NUM_BEAMS, "return_all_decodes": True, "decoder_params": limits}
    decodes, aux = self._model.predict_batch_with_aux(params, batch, **options)
    return decodes, aux["scores"]

  def _score(self, params: PyTree, batch: Any) -> jax.Array:
    if self.is_decoder:
      name = "decoder_causal_attention"
      missing = self._total_length - batch[name].shape[1]
      batch = {**batch, name: jnp.pad(batch[name], ((0, 0), (0, missing)))}
    _, intermediates = self._model.score_batch(params, batch, return_intermediates=True)
    scores_BT: jax.Array = intermediates["decoder"]["token_scores"][0]
    return scores_BT

  def _compile(self, opened: OpenedModel, calls: Collection[str]) -> None:
    partitioner, params, every = opened.partitioner, self._params, PartitionSpec()
    is_split = self.num_slots % partitioner.data_mesh_size == 0
    data: Any = partitioner.data_partition_spec if is_split else every
    axes = [every if n is None else PartitionSpec(*([None] * n), *data) for n, _ in self._axes]
    of_state = SlotState(data, data, data, data, data, data, axes)
    of_params = opened.state_axes.params
    self._state: SlotState = partitioner.partition(self._empty, (of_params,), of_state)(params)
    programs: dict[Any, Callable[[], Any]] = {}

    def add(key: Any, fn: Callable[..., Any], in_axes: Any, out_axes: Any, *arguments: Any) -> None:
      donated = 0 if isinstance(arguments[0], SlotState) else ()
      partitioned = partitioner.partition(fn, in_axes, out_axes, donate_argnums=donated)
      programs[key] = functools.partial(partitioned.compile, *arguments)

    def batch(count: int, length: int) -> dict[str, np.ndarray]:
      return self._batch([((), ())] * count, length)

    slot, is_kept = np.zeros(1, np.int32), np.ones(self.num_slots, bool)
    copied = (self._state, slot, slot, self._new([_NO_TASK]))
    add("copy", self._copy, (of_state, every, every, every), of_state, *copied)
    with_params, model = (of_state, of_params, every), self._model
    calls_of = {"beams": self._beams, "score": self._score}
    if not self.is_decoder:
      encoder = EncoderModel(model.module, model.input_vocabulary, model.output_vocabulary, None)
      calls_of |= {"attention": model.cross_attention, "embed": encoder.embed_batch}
    for length in self.lengths:
      for count in BATCH_SIZES:
        new = (batch(count, length), np.zeros(count, np.int32), self._new([_NO_TASK] * count))
        admit = (self._admit, (*with_params, every, every), of_state)
        add(("admit", length, count), *admit, self._state, params, *new)
      if length == self.lengths[-1] or not self.is_decoder:
        step = functools.partial(self._step, length)
        add(("step", length), step, with_params, (of_state, every), self._state, params, is_kept)
      for name in calls_of.keys() & {*calls}:
        given = (params, batch(BATCH_SIZES[-1], length))
        add((name, length), calls_of[name], (of_params, every), every, *given)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
      compiled = pool.map(lambda compile: compile(), programs.values())
      self._compiled = dict(zip(programs, compiled, strict=True))

  def length_of(self, num_tokens: int) -> int:
    """Returns the shortest length of inputs that have so many tokens."""
    return next(length for length in self.lengths if length >= num_tokens)

  def admit(self, tasks: Mapping[int, Task]) -> None:
    """Puts tasks, at most `BATCH_SIZES[-1]`, into slots, after their inputs are computed."""
    count = next(n for n in BATCH_SIZES if n >= len(tasks))
    length = self.length_of(max(len(task.inputs) for task in tasks.values()))
    filled = [*tasks.values(), *[_NO_TASK] * (count - len(tasks))]
    slots_B = np.array([*tasks, *[_NO_SLOT] * (count - len(tasks))], np.int32)
    batch = self._batch([(task.inputs, ()) for task in filled], length)
    program = self._compiled["admit", length, count]
    self._state = program(self._state, self._params, batch, slots_B, self._new(filled))

  def copy(self, slot: int, task: Task, source: int, position: int) -> None:
    """Puts a task into a slot, with the arrays of another slot.

    Args:
      slot: the slot.
      task: the task.
      source: the slot that has the arrays of the task's inputs.
      position: the position from which these are computed again, one in a step; 0 with an encoder.
    """
    new = self._new([task]).replace(position=np.array([position], np.int32))
    one = (np.array([source], np.int32), np.array([slot], np.int32))
    self._state = self._compiled["copy"](self._state, *one, new)

  def step(self, longest: int, is_kept: np.ndarray) -> StepOutput:
    """Advances all slots by one token, and returns what `slots.step` reports.

    Args:
      longest: the number of tokens of the longest inputs in a slot.
      is_kept: [N] see `slots.step`.
    """
    length = self.lengths[-1] if self.is_decoder else self.length_of(longest)
    program = self._compiled["step", length]
    self._state, output = program(self._state, self._params, is_kept)
    for x in output:
      x.copy_to_host_async()
    found: StepOutput = output
    return found

  def call(self, name: str, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Any]:
    """Returns a result for each pair of inputs and targets, of which there are at most `BATCH_SIZES[-1]`.

    Args:
      name: "beams" for decodes [NUM_BEAMS, T] and their scores, the best last; "score" for the log
        probability of each target; "attention" for `EncoderDecoderModel.cross_attention`; "embed" for the
        mean of the encoder's outputs.
      rows: the inputs and the targets.
    """
    length = self.length_of(max(len(inputs) for inputs, _ in rows))
    batch = self._batch([*rows, *[rows[0]] * (BATCH_SIZES[-1] - len(rows))], length)
    results = jax.device_get(self._compiled[name, length](self._params, batch))
    return [jax.tree.map(lambda x, n=n: x[n], results) for n in range(len(rows))]


_NO_TASK = Task((), 1, SlotControls())


def padded(rows: Sequence[Sequence[int]], length: int, pad_id: int) -> np.ndarray:
  """Returns rows of tokens as an array [B, length]."""
  array = np.full((len(rows), length), pad_id, np.int32)
  for target, row in zip(array, rows, strict=True):
    target[: len(row)] = row
  return array
