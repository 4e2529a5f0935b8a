"""The calls of a served model that are made for a few requests at once: beam search, scores and vectors."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from rosetta_t5 import decoding
from rosetta_t5.models import EncoderModel
from rosetta_t5.models.base_model import set_decode_fn
from rosetta_t5.serving.programs import BATCH_SIZES, Programs, padded
from rosetta_t5.trained_model import OpenedModel

NUM_BEAMS = 4
CALLS = ("beams", "score", "embed")


class BatchPrograms:
  """Compiled programs of a model for batches of `BATCH_SIZES[-1]` rows, at the lengths of `Programs`."""

  def __init__(
    self,
    opened: OpenedModel,
    programs: Programs,
    eos_id: decoding.next_token.EndIds,
    controls: decoding.Controls,
    calls: Collection[str] = CALLS,
  ):
    """Compiles the programs of `calls`; see `Programs` for the other arguments."""
    self._programs, self._pad_id = programs, opened.model.pad_id
    self._params = opened.state.params
    model = copy.copy(opened.model)
    decode_fn = getattr(model.decode_fn, "func", model.decode_fn)  # of a partial
    searches = inspect.unwrap(decode_fn) is inspect.unwrap(decoding.beam_search)
    defaults = decoding.Controls(pad_id=controls.pad_id)._asdict()
    changed = {name: x for name, x in controls._asdict().items() if x != defaults[name]}
    set_decode_fn(model, model.decode_fn if searches else decoding.beam_search, **changed)

    def beams(params: Any, batch: Any) -> Any:
      options: dict[str, Any] = {"num_decodes": NUM_BEAMS, "return_all_decodes": True}
      options["decoder_params"] = {"eos_id": eos_id, "max_decode_step": programs.output_length}
      decodes, aux = model.predict_batch_with_aux(params, batch, **options)
      return decodes, aux["scores"]

    def score(params: Any, batch: Any) -> Any:
      _, intermediates = model.score_batch(params, batch, return_intermediates=True)
      return intermediates["decoder"]["token_scores"][0]

    fns: dict[str, Callable[..., Any]] = {"beams": beams, "score": score}
    if not programs.is_decoder:
      vocabularies = (model.input_vocabulary, model.output_vocabulary)
      fns["embed"] = EncoderModel(model.module, *vocabularies, None).embed_batch
    self._compiled: dict[tuple[str, int], Callable[..., Any]] = {}
    in_axes = (opened.state_axes.params, PartitionSpec())
    for name in fns.keys() & {*calls}:
      fn = fns[name]
      partitioned = opened.partitioner.partition(fn, in_axes, PartitionSpec())
      for length in programs.lengths:
        batch = (
          self._with_targets([((), ())], length) if name == "score" else self._inputs([()], length)
        )
        self._compiled[name, length] = partitioned.compile(self._params, batch)

  def _inputs(self, rows: Sequence[Sequence[int]], length: int) -> dict[str, np.ndarray]:
    return self._programs.inputs(_filled(rows), length)

  def _with_targets(
    self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], length: int
  ) -> dict[str, np.ndarray]:
    """Returns a batch that has inputs and targets."""
    inputs, targets = zip(*_filled(pairs), strict=True)
    batch, total = self._programs.inputs(inputs, length), self._programs.total_length
    if not self._programs.is_decoder:
      shifted = [(self._pad_id, *target[:-1]) for target in targets]
      batch["decoder_input_tokens"] = padded(shifted, total, self._pad_id)
      return batch | {"decoder_target_tokens": padded(targets, total, self._pad_id)}
    rows = [(*before, *after) for before, after in zip(inputs, targets, strict=True)]
    batch["decoder_input_tokens"] = padded([row[:-1] for row in rows], total, self._pad_id)
    batch["decoder_target_tokens"] = padded([row[1:] for row in rows], total, self._pad_id)
    mask = batch["decoder_causal_attention"]
    batch["decoder_causal_attention"] = np.pad(mask, ((0, 0), (0, total - mask.shape[1])))
    return batch

  def _run(self, name: str, rows: Sequence[Sequence[int]], make_batch: Any, given: Any) -> Any:
    length = self._programs.length_of(max(map(len, rows)))
    return jax.device_get(self._compiled[name, length](self._params, make_batch(given, length)))

  def beams(self, rows: Sequence[Sequence[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the decodes [NUM_BEAMS, T] of each row with their scores, the best last."""
    decodes, scores = self._run("beams", rows, self._inputs, rows)
    return list(zip(decodes, scores, strict=True))[: len(rows)]

  def embed(self, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Returns the mean of the encoder's outputs for each row."""
    return list(self._run("embed", rows, self._inputs, rows))[: len(rows)]

  def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[np.ndarray]:
    """Returns the log probability of each token of the targets, given the inputs."""
    inputs = [row for row, _ in pairs]
    scores = self._run("score", inputs, self._with_targets, pairs)
    found = []
    for (before, target), row in zip(pairs, scores, strict=False):
      first = len(before) - 1 if self._programs.is_decoder else 0
      found.append(row[first : first + len(target)])
    return found


def _filled(rows: Sequence[Any]) -> list[Any]:
  """Returns a full batch of rows, the last of which are copies of the first."""
  return [*rows, *[rows[0]] * (BATCH_SIZES[-1] - len(rows))]
