"""Inference, from top to bottom: data, checkpoint, and for each task its results in a file."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from rosetta_t5 import checkpoints, config, data
from rosetta_t5.data.pipeline.inference_data import InferenceData
from rosetta_t5.distributed import Watchdog
from rosetta_t5.inference.infer_fn import InferFn, get_infer_fn
from rosetta_t5.inference.result_chunks import COMPLETED, ChunkFolder, FailFastThreadPoolExecutor
from rosetta_t5.inference.results import (
  check_mode,
  check_output_dir,
  merge_chunks_to_file,
  write_inferences_to_file,
)
from rosetta_t5.memory_advice import Inference
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.plan import describe_run
from rosetta_t5.telemetry import console
from rosetta_t5.telemetry.model_info import log_model_info

_METHODS = {"predict": "predict_batch", "score": "score_batch"}


def infer(
  *,
  mode: str,
  model: Any,
  dataset_cfg: data.DatasetConfig,
  restore_checkpoint_cfg: checkpoints.RestoreCheckpointConfig,
  partitioner: BasePartitioner,
  output_dir: str,
  checkpoint_period: int,
  shard_id: int = 0,
  num_shards: int = 1,
  merge_chunked_results: bool = True,
  write_fn: Callable[..., None] = write_inferences_to_file,
  checkpoint_ds_iter: bool = True,
  train_state_initializer_cls: Any = checkpoints.TrainStateInitializer,
  fallback_init_rng: int | None = None,
  merge_fn: Callable[[str, str, str, int | None], None] = merge_chunks_to_file,
  summarize_config_fn: Callable[..., None] = config.summarize_gin_config,
  verify_matching_vocabs_fn: Callable[..., None] | None = data.verify_matching_vocabs,
  output_vocab_feature_name: str = "targets",
  file_extension: str = "jsonl",
  keep_aux_as_numpy: bool = False,
  use_orbax: bool = True,
  input_length_buckets: Sequence[int] | None = (),
) -> None:
  """Writes what a model predicts for a task's examples, or how likely it finds their targets.

  Results grow in chunks in OUTPUT_DIR/tmp-…; a run that was killed goes on after its last complete
  chunk, with the same results as one that was not. In the end they are
  OUTPUT_DIR/TASK-MODE.jsonl-00000-of-00001, and a file ….COMPLETED lies beside it.

  Args:
    mode: 'predict', 'score', or 'predict_with_aux' for predictions and their scores.
    model: the model.
    dataset_cfg: the task or mixture, its split and lengths, the batch size.
    restore_checkpoint_cfg: one checkpoint.
    partitioner: how arrays are split over devices.
    output_dir: the folder of all files.
    checkpoint_period: batches in a chunk.
    shard_id: which shard of the examples this run is for.
    num_shards: runs that share the examples.
    merge_chunked_results: False leaves the chunks as they are.
    write_fn: writes a chunk, as f(path, (outputs, aux), task's examples, mode, vocabulary).
    checkpoint_ds_iter: T5X's choice of how a killed run finds its position; here examples are
      counted, which is exact for every pipeline.
    train_state_initializer_cls: makes the train state.
    fallback_init_rng: a seed for what the checkpoint lacks, if the config allows that.
    merge_fn: joins the chunks, as f(output_dir, file name, folder of the chunks, step).
    summarize_config_fn: called as f(model_dir, summary_writer, step) to write the configuration.
    verify_matching_vocabs_fn: checks the vocabularies of task and model; None for no check.
    output_vocab_feature_name: the task's feature whose vocabulary the predictions are in.
    file_extension: what comes in place of jsonl.
    keep_aux_as_numpy: give `write_fn` auxiliary values as arrays.
    use_orbax: T5X's choice of layout; it is found by looking.
    input_length_buckets: shorter lengths for batches of short inputs; see `get_infer_fn`.

  Raises:
    ValueError: something given does not fit together, or an earlier run with other settings left
      its chunks.
  """
  del checkpoint_ds_iter, use_orbax
  check_mode(mode)
  output_dir = re.sub(r"(?<!gs:)/{2,}", "/", output_dir)
  check_output_dir("infer.output_dir", output_dir)
  _, paths = checkpoints.get_first_valid_restore_config_and_paths([restore_checkpoint_cfg])
  checkpoints.check_checkpoints_exist(paths)
  if verify_matching_vocabs_fn is not None:
    verify_matching_vocabs_fn(dataset_cfg, model)
  examples = InferenceData(dataset_cfg, model.FEATURE_CONVERTER_CLS, shard_id, num_shards)
  spec = examples.element_spec()
  shapes = {name: (dataset_cfg.batch_size, *x.shape) for name, x in spec.items()}
  initializer = train_state_initializer_cls(
    optimizer_def=None,  # its state is not read from the checkpoint
    init_fn=model.get_initial_variables,
    input_shapes=shapes,
    input_types={name: np.dtype(x.dtype.as_numpy_dtype) for name, x in spec.items()},
    partitioner=partitioner,
  )
  fitting = Inference(
    model, partitioner, initializer, shapes, mode == "score", restore_checkpoint_cfg.dtype
  )
  state = _restored(initializer, restore_checkpoint_cfg, fallback_init_rng, fitting)
  if shard_id == 0:
    summarize_config_fn(model_dir=output_dir, summary_writer=None, step=0)
    info_file = os.path.join(output_dir, "model-info.txt")
    log_model_info(info_file, initializer.global_train_state_shape, partitioner)

  infer_fn = functools.partial(
    get_infer_fn(
      getattr(model, _METHODS.get(mode, "predict_batch_with_aux")),
      dataset_cfg.batch_size,
      initializer.train_state_axes,
      partitioner,
      keep_aux_as_numpy,
      input_length_buckets,
      is_scoring=mode == "score",
    ),
    train_state=state,
  )
  shard = f"{shard_id:05}-of-{num_shards:05}"
  settings = _settings(
    mode, dataset_cfg, checkpoint_period, restore_checkpoint_cfg, state.step, input_length_buckets
  )
  with Watchdog() as watchdog:
    for task in examples.tasks:
      file = _ResultFile(output_dir, f"{task.name}-{mode}.{file_extension}-{shard}")
      if file.is_complete():
        console.print_line(f"{file.path} is complete: nothing was left to do")
        continue
      folder = ChunkFolder(f"{output_dir}/tmp-{task.name}-{shard}", file.name, settings)
      vocabulary = task.output_features[output_vocab_feature_name].vocabulary
      write = functools.partial(_write_chunk, folder, write_fn, mode, vocabulary)
      chunks = functools.partial(examples.chunks, task, checkpoint_period * dataset_cfg.batch_size)
      with fitting.answered_when_out_of_memory():
        _infer_task(infer_fn, chunks, folder, write, watchdog)
      file.finish(folder, int(state.step), merge_fn if merge_chunked_results else None)


def main(argv: Sequence[str] | None = None) -> None:
  """Runs `infer` as the command line and its gin files say (`python -m t5x.infer`)."""
  config.run_from_command_line(infer, argv, describe_run)


def _restored(
  initializer: Any,
  cfg: checkpoints.RestoreCheckpointConfig,
  fallback_init_rng: int | None,
  fitting: Inference,
) -> Any:
  init_rng = None if fallback_init_rng is None else jax.random.PRNGKey(fallback_init_rng)
  with fitting.answered_when_out_of_memory(is_restoring=True):
    state = jax.block_until_ready(initializer.from_checkpoint([cfg], init_rng=init_rng))
  if state is None:
    raise ValueError(_no_checkpoint_text(cfg))
  return state


def _infer_task(
  infer_fn: InferFn,
  chunks: Callable[..., Any],
  folder: ChunkFolder,
  write: Callable[[int, Any, Any], None],
  watchdog: Watchdog,
) -> None:
  """Runs the chunks that are not there yet; while one is written the next is computed."""
  first = folder.num_complete()
  if first:
    console.print_line(f"going on after {first} chunks in {folder.path}")
  writer = FailFastThreadPoolExecutor(max_workers=1)
  try:
    for number, task_ds, model_ds in chunks(first=first):
      started = time.monotonic()
      watchdog.set_phase(f"inferring chunk {number}")
      # A key a chunk, so that a run that goes on draws what an unkilled one would.
      rng = jax.random.fold_in(jax.random.PRNGKey(0), number)
      result = infer_fn(model_ds.enumerate(), rng=rng)
      outputs, aux = result if isinstance(result, tuple) else (result, {})
      seconds = time.monotonic() - started
      console.print_line(
        f"chunk {number}: {len(outputs)} examples, {len(outputs) / seconds:.4g} a second"
      )
      update_measurement_series("inference_total_sec", number, seconds)
      if jax.process_index() == 0:
        writer.submit(write, number, ([output for _, output in outputs], aux), task_ds)
    watchdog.set_phase("writing the last chunks")  # which the other processes wait for
  finally:
    writer.shutdown(wait=True)


def _write_chunk(
  folder: ChunkFolder,
  write_fn: Callable[..., None],
  mode: str,
  vocabulary: Any,
  number: int,
  inferences: tuple[Sequence[Any], Mapping[str, Any]],
  task_ds: Any,
) -> None:
  started = time.monotonic()
  write_fn(folder.chunk(number), inferences, task_ds, mode, vocabulary)
  folder.mark_complete(number)
  update_measurement_series("writing_total_sec", number, time.monotonic() - started)


def update_measurement_series(series_name: str, step: int, value: float) -> None:
  """Does nothing; a place to hook measurements of chunks in, as in T5X."""
  del series_name, step, value


@dataclasses.dataclass(frozen=True)
class _ResultFile:
  """The file that all chunks end up in; complete when `….COMPLETED` lies beside it."""

  output_dir: str
  name: str

  @property
  def path(self) -> str:
    return os.path.join(self.output_dir, self.name)

  def is_complete(self) -> bool:
    return epath.Path(self.path + COMPLETED).exists()

  def finish(self, folder: ChunkFolder, step: int, merge_fn: Callable[..., None] | None) -> None:
    """Merges the chunks, and only then removes them; all processes wait for the first."""
    if not folder.num_complete():
      raise ValueError(
        f"no example came out of the data for {self.name}: its split is empty, or has fewer "
        "examples than infer.num_shards. Look at DatasetConfig.split and the task's files"
      )
    if jax.process_index() == 0:
      if merge_fn is not None:
        merge_fn(self.output_dir, self.name, os.fspath(folder.path), step)
      epath.Path(self.path + COMPLETED).write_text("")
      if merge_fn is not None:
        folder.path.rmtree()
    console.print_line(f"results  {self.path if merge_fn is not None else folder.path}")
    if jax.process_count() > 1:
      from jax.experimental import multihost_utils

      multihost_utils.sync_global_devices(f"{self.name}:complete")


def _settings(
  mode: str,
  cfg: data.DatasetConfig,
  checkpoint_period: int,
  restore_cfg: checkpoints.RestoreCheckpointConfig,
  step: Any,
  input_length_buckets: Sequence[int] | None,
) -> dict[str, Any]:
  """What decides about the content of the chunks."""
  buckets = input_length_buckets
  return {
    "infer.mode": mode,
    "infer.checkpoint_period": checkpoint_period,
    "DatasetConfig.batch_size": cfg.batch_size,
    "DatasetConfig.split": cfg.split,
    "DatasetConfig.task_feature_lengths": dict(cfg.task_feature_lengths),
    "RestoreCheckpointConfig.path": str(restore_cfg.path),
    "RestoreCheckpointConfig.dtype": str(restore_cfg.dtype),
    "the checkpoint's step": int(step),
    **({"infer.input_length_buckets": list(buckets)} if buckets else {}),
  }


def _no_checkpoint_text(cfg: checkpoints.RestoreCheckpointConfig) -> str:
  return (
    f"there is no checkpoint to infer with in {cfg.path} (mode = {cfg.mode!r}): set CHECKPOINT_PATH "
    "(RestoreCheckpointConfig.path) to a checkpoint_STEP folder, or mode = 'latest' and the folder "
    "above it"
  )
