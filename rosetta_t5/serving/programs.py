"""The compiled programs of a served model: all are compiled at the start, for a few lengths of inputs."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import tree_leaves_with_path, tree_map_with_path
from jaxtyping import Array

from rosetta_t5 import decoding
from rosetta_t5.decoding import slots
from rosetta_t5.decoding.next_token import EndIds
from rosetta_t5.decoding.slots import SlotControls, SlotState, StepOutput
from rosetta_t5.inference.infer_fn import default_buckets
from rosetta_t5.models import DecoderOnlyModel
from rosetta_t5.trained_model import OpenedModel

PyTree = Any

BATCH_SIZES = (1, 4)  # The numbers of requests whose inputs are computed together.
NUM_BEAMS = 4
CALLS = ("beams", "score", "attention", "embed")
_NO_SLOT = np.iinfo(np.int32).max  # The slot of a filler, which nothing is written to.


@dataclasses.dataclass(eq=False)
class Request:
  """What a model computes, and who receives it.

  Attributes:
    inputs: the tokens of the inputs; with a decoder, those that the sequence begins with.
    max_tokens: the maximum number of tokens to generate.
    controls: how they are chosen.
    call: the one of `CALLS` that is computed instead of a sequence.
    target: its target.
    results: receives `index` and the output of each step, or the result of the call, or the exception that
      ended the request.
    index: that of the request among those that share `results`.
    is_done: when True, nothing more is computed for it.
  """

  inputs: tuple[int, ...] = ()
  max_tokens: int = 1
  controls: SlotControls = dataclasses.field(default_factory=SlotControls)
  call: str = ""
  target: Sequence[int] = ()
  results: asyncio.Queue[Any] = dataclasses.field(default_factory=asyncio.Queue)
  index: int = 0
  is_done: bool = False


_FILLER = Request((0,))  # fills up a batch


class Programs:
  """The programs of a model, with the state of its slots.

  The inputs of a sequence are computed once, at the shortest of a few lengths, and put into a slot (`admit`), or
  are copied from a slot with the same inputs (`copy`). `step` advances all slots by one token. Slots have
  room for the longest inputs; a step reads as much of them as the longest of its inputs needs.

  Attributes:
    num_slots: N, the number of slots.
    output_length: the maximum number of tokens that are generated.
    lengths: the lengths of inputs for which there are programs, in ascending order.
    is_decoder: whether the model has no encoder, so that sequences begin with the inputs.
    keeps_inputs: whether slots keep the arrays of their inputs. The caches of a decoder's local layers do not.
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
      controls: those of all sequences besides their own.
      calls: which of `CALLS` are compiled.
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
    # The lengths of inputs for which there are steps and calls.
    self._read_lengths = (self._total_length,) if self.is_decoder else self.lengths
    self._find_axes()
    self._compile(opened, calls)

  def _find_axes(self) -> None:
    """Finds the dimensions of the model's arrays that are the requests' and the inputs', by their shapes."""

    def shapes(count: int, length: int) -> PyTree:
      return jax.eval_shape(self._arrays, self._params, self._batch([_FILLER] * count, length))

    def changed(path: Any, x: Any, y: Any) -> int:
      # The positions of the slots replace the cache indices of the layers (`slots.with_index`).
      if path[-1].key in slots.INDICES:
        return -1
      sizes = enumerate(zip(x.shape, y.shape, strict=True))
      return next((axis for axis, (a, b) in sizes if a != b), -1)

    longest = self.lengths[-1]
    arrays, longer = shapes(2, longest), longest + 8 * (not self.is_decoder)
    # For each array the dimension of the requests, -1 for arrays that all share, and that of the
    # inputs, -1 for arrays that do not have it.
    self._slot_axes = tree_map_with_path(changed, arrays, shapes(3, longest))
    self._length_axes = tree_map_with_path(changed, arrays, shapes(2, longer))
    leaves = tree_leaves_with_path(arrays)
    caches = [x for path, x in leaves if path[-1].key == "cached_value"]
    is_whole = all(x.shape[-2] == self._total_length for x in caches)
    self.keeps_inputs = is_whole or not self.is_decoder

  def _batch(self, requests: Sequence[Request], length: int) -> dict[str, np.ndarray]:
    """Returns a batch of the model with inputs of at most `length` tokens, and targets."""
    rows = [(*self._prefix(request), *request.target) for request in requests]
    tokens = self._padded(rows, self._total_length + 1)
    inputs = [request.inputs for request in requests]
    batch = {"decoder_input_tokens": tokens[:, :-1], "decoder_target_tokens": tokens[:, 1:]}
    if not self.is_decoder:
      return {**batch, "encoder_input_tokens": self._padded(inputs, length)}
    is_input = np.arange(length)[None] < [[len(row)] for row in inputs]
    return {**batch, "decoder_causal_attention": is_input.astype(np.int32)}

  def _prefix(self, request: Request) -> tuple[int, ...]:
    """Returns the tokens that a sequence begins with."""
    return request.inputs if self.is_decoder else (self._model.start_id,)

  def _padded(self, rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """Returns rows of tokens as an array [B, length]."""
    array = np.full((len(rows), length), self._model.pad_id, np.int32)
    for target, row in zip(array, rows, strict=True):
      target[: len(row)] = row
    return array

  def _arrays(self, params: PyTree, batch: Any) -> dict[str, PyTree]:
    start = self._model.start_decoding(params, batch)
    return {"cache": start.cache, "others": self._model.step_arrays(params, start)}

  def _new(self, requests: Sequence[Request]) -> SlotState:
    """Returns the state of sequences that begin, without the model's arrays."""
    prefixes = [*map(self._prefix, requests)]
    start = np.array([*map(len, prefixes)], np.int32)
    most = np.array([request.max_tokens for request in requests], np.int32)
    stack = lambda default, *own: np.array(own, default.dtype)  # noqa: E731
    return SlotState(
      tokens=self._padded(prefixes, self._total_length + 1),
      position=start - 1,
      start=start,
      end=np.minimum(start + most, self._total_length + 1),
      controls=jax.tree.map(stack, SlotControls(), *(request.controls for request in requests)),
      is_running=np.ones(len(requests), bool),
    )

  def _empty(self, params: PyTree) -> SlotState:
    """Returns slots without sequences."""
    filled = [_FILLER] * self.num_slots
    arrays = self._arrays(params, self._batch(filled, self.lengths[-1]))
    clear = lambda x, axis: x if axis < 0 else jnp.zeros_like(x)  # noqa: E731
    arrays = jax.tree.map(clear, arrays, self._slot_axes)
    new = jax.tree.map(jnp.asarray, self._new(filled))
    return new.replace(is_running=jnp.zeros(self.num_slots, bool), arrays=arrays)

  def _put(self, state: SlotState, slots_B: Array, new: SlotState, arrays: Any) -> SlotState:
    """Returns slots with the state and the arrays of new sequences."""

    def put(x: Array, y: Array, axis: int = 0) -> Array:
      if axis < 0:
        return x
      sizes = enumerate(zip(x.shape, y.shape, strict=True))
      widths = [(0, 0 if n == axis else a - b) for n, (a, b) in sizes]
      y = jnp.pad(y, widths, constant_values=self._model.pad_id)  # Inputs may be shorter.
      return x.at[(*[slice(None)] * axis, slots_B)].set(y, mode="drop")

    fields = jax.tree.map(put, state.replace(arrays=()), new)
    return fields.replace(arrays=jax.tree.map(put, state.arrays, arrays, self._slot_axes))

  def _admit(
    self, state: SlotState, params: PyTree, batch: Any, slots_B: Array, new: SlotState
  ) -> SlotState:
    return self._put(state, slots_B, new, self._arrays(params, batch))

  def _copy(self, state: SlotState, source_1: Array, slots_1: Array, new: SlotState) -> SlotState:
    take = lambda x, axis: x if axis < 0 else jnp.take(x, source_1, axis)  # noqa: E731
    return self._put(state, slots_1, new, jax.tree.map(take, state.arrays, self._slot_axes))

  def _step(
    self, length: int, state: SlotState, params: PyTree, is_kept_N: Array
  ) -> tuple[SlotState, StepOutput]:
    unread = self._read_lengths[-1] - length

    def read(x: Array, axis: int) -> Array:
      return x if axis < 0 else jax.lax.slice_in_dim(x, 0, x.shape[axis] - unread, axis=axis)

    arrays = jax.tree.map(read, state.arrays, self._length_axes)
    has_layers = bool(getattr(self._model.module, "scan_layers", False))
    cache = slots.with_index(arrays["cache"], state.position, has_layers)
    options = (params, self._total_length, arrays["others"])
    next_logits = functools.partial(self._model.next_logits, *options)
    shared: Any = (self._eos_id, self._controls)
    new, cache, output = slots.step(state, is_kept_N, next_logits, cache, *shared)
    written = {**arrays, "cache": cache}
    # A step writes only arrays that have no length of inputs.
    choose = lambda x, y, axis, length_axis: x if axis < 0 or length_axis >= 0 else y  # noqa: E731
    axes = (self._slot_axes, self._length_axes)
    return new.replace(arrays=jax.tree.map(choose, state.arrays, written, *axes)), output

  def _beams(self, params: PyTree, batch: Any) -> tuple[Array, Array]:
    limits = {"eos_id": self._eos_id, "max_decode_step": self.output_length}
    options: Any = {"num_decodes": NUM_BEAMS, "return_all_decodes": True, "decoder_params": limits}
    decodes, aux = self._model.predict_batch_with_aux(params, batch, **options)
    return decodes, aux["scores"]

  def _score(self, params: PyTree, batch: Any) -> Array:
    _, intermediates = self._model.score_batch(params, batch, return_intermediates=True)
    scores_BT: Array = intermediates["decoder"]["token_scores"][0]
    return scores_BT

  def _compile(self, opened: OpenedModel, calls: Collection[str]) -> None:
    partitioner, params, every = opened.partitioner, self._params, PartitionSpec()
    is_split = self.num_slots % partitioner.data_mesh_size == 0
    data: Any = partitioner.data_partition_spec if is_split else every
    spec = lambda axis: every if axis < 0 else PartitionSpec(*[None] * axis, *data)  # noqa: E731
    axes = jax.tree.map(spec, self._slot_axes)
    of_state = SlotState(data, data, data, data, data, data, axes)
    of_params = opened.state_axes.params
    state: SlotState = partitioner.partition(self._empty, (of_params,), of_state)(params)
    kinds = {id(state): of_state, id(params): of_params}
    programs: dict[Any, Callable[[], Any]] = {}

    def add(key: Any, fn: Callable[..., Any], out_axes: Any, *arguments: Any) -> None:
      in_axes = tuple(kinds.get(id(x), every) for x in arguments)
      donated = 0 if arguments[0] is state else ()
      partitioned = partitioner.partition(fn, in_axes, out_axes, donate_argnums=donated)
      programs[key] = functools.partial(partitioned.compile, *arguments)

    one, is_kept, model = np.zeros(1, np.int32), np.ones(self.num_slots, bool), self._model
    add("copy", self._copy, of_state, state, one, one, self._new([_FILLER]))
    fns = {"beams": self._beams, "score": self._score}
    if not self.is_decoder:
      fns |= {"attention": model.cross_attention, "embed": model.embed_batch}
    for length in self.lengths:
      for count in BATCH_SIZES:
        filled = [_FILLER] * count
        new = (self._batch(filled, length), np.zeros(count, np.int32), self._new(filled))
        add(("admit", length, count), self._admit, of_state, state, params, *new)
    for length in self._read_lengths:
      step = functools.partial(self._step, length)
      add(("step", length), step, (of_state, every), state, params, is_kept)
    for name in fns.keys() & {*calls}:
      for length in self._lengths_of(name):
        batch = self._batch([_FILLER] * BATCH_SIZES[-1], length)
        add((name, length), fns[name], every, params, batch)
    self._state = state
    with ThreadPoolExecutor(os.cpu_count()) as pool:
      compiled = pool.map(lambda compile: compile(), programs.values())
      self._compiled = dict(zip(programs, compiled, strict=True))

  def _lengths_of(self, call: str) -> Sequence[int]:
    # The other calls are rarer than embeddings, and their programs take longer to compile.
    return self._read_lengths if call == "embed" else self._read_lengths[-1:]

  def admit(self, requests: Mapping[int, Request]) -> None:
    """Puts sequences, at most `BATCH_SIZES[-1]`, into slots, after their inputs are computed."""
    count = next(n for n in BATCH_SIZES if n >= len(requests))
    missing = count - len(requests)
    filled = [*requests.values(), *[_FILLER] * missing]
    slots_B = np.array([*requests, *[_NO_SLOT] * missing], np.int32)
    length = _shortest(self.lengths, filled)
    new = (self._batch(filled, length), slots_B, self._new(filled))
    self._state = self._compiled["admit", length, count](self._state, self._params, *new)

  def copy(self, slot: int, request: Request, source: int) -> None:
    """Puts a sequence into a slot, with the arrays of another slot that has the same inputs."""
    one = (np.array([source], np.int32), np.array([slot], np.int32), self._new([request]))
    self._state = self._compiled["copy"](self._state, *one)

  def step(self, requests: Mapping[int, Request]) -> StepOutput:
    """Advances these requests, by slot, by one token, and returns what `slots.step` reports."""
    is_kept_N = np.isin(np.arange(self.num_slots), [*requests])
    program = self._compiled["step", _shortest(self._read_lengths, requests.values())]
    output: StepOutput
    self._state, output = program(self._state, self._params, is_kept_N)
    for x in output:
      x.copy_to_host_async()
    return output

  def call(self, name: str, requests: Sequence[Request]) -> list[Any]:
    """Returns a result for each request, of which there are at most `BATCH_SIZES[-1]`.

    Args:
      name: "beams" for decodes [NUM_BEAMS, T] and their scores, the best last; "score" for the log
        probability of each target; "attention" for `EncoderDecoderModel.cross_attention`; "embed" for the
        mean of the encoder's outputs.
      requests: their inputs and targets are used.
    """
    length = _shortest(self._lengths_of(name), requests)
    batch = self._batch([*requests, *[_FILLER] * (BATCH_SIZES[-1] - len(requests))], length)
    results = jax.device_get(self._compiled[name, length](self._params, batch))
    return [jax.tree.map(lambda x, n=n: x[n], results) for n in range(len(requests))]


def _shortest(lengths: Sequence[int], requests: Collection[Request]) -> int:
  """Returns the shortest of some lengths that the inputs of requests fit into."""
  longest = max(len(request.inputs) for request in requests)
  return next(length for length in lengths if length >= longest)
