"""Inference, from top to bottom: data, checkpoint, and a file of results for each task."""

import dataclasses
import functools
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from rosetta_t5 import checkpoints, config, data, terminal
from rosetta_t5.argument_types import FolderName, NonNegative, Positive, Seed, check_one_of
from rosetta_t5.data.pipeline.data_description import describe_tasks
from rosetta_t5.data.pipeline.inference_data import InferenceData
from rosetta_t5.distributed import Watchdog
from rosetta_t5.inference import infer_fn as inference
from rosetta_t5.inference import result_files
from rosetta_t5.inference.infer_fn import InferFn
from rosetta_t5.models import BaseModel
from rosetta_t5.out_of_memory import INFERENCE, explain_out_of_memory
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.plan.description import describe_run
from rosetta_t5.telemetry.console import log_model_info


def infer(
  *,
  mode: str,
  model: BaseModel,
  dataset_cfg: data.DatasetConfig,
  restore_checkpoint_cfg: checkpoints.RestoreCheckpointConfig,
  partitioner: BasePartitioner,
  output_dir: FolderName,
  checkpoint_period: Positive,
  shard_id: NonNegative = 0,
  num_shards: Positive = 1,
  merge_chunked_results: bool = True,
  write_fn: Callable[..., None] = result_files.write_inferences_to_file,
  checkpoint_ds_iter: bool = True,
  train_state_initializer_cls: Any = checkpoints.TrainStateInitializer,
  fallback_init_rng: Seed | None = None,
  merge_fn: Callable[[str, str, str, int | None], None] = result_files.merge_chunks_to_file,
  summarize_config_fn: Callable[..., None] = config.summarize_gin_config,
  verify_matching_vocabs_fn: Callable[..., None] | None = data.verify_matching_vocabs,
  output_vocab_feature_name: str = "targets",
  file_extension: str = "jsonl",
  keep_aux_as_numpy: bool = False,
  use_orbax: bool = True,
  input_length_buckets: Sequence[Positive] | None = (),
) -> None:
  """Writes a model's predictions for a task's examples, or the scores of their targets.

  Results are written in chunks to OUTPUT_DIR/tmp-…. A run that was killed continues after its last
  complete chunk and has the same results as an uninterrupted run. At the end they are merged into
  OUTPUT_DIR/TASK-MODE.jsonl-00000-of-00001, and a file ….COMPLETED is written beside it.

  Args:
    mode: 'predict', 'score', or 'predict_with_aux' for predictions with their scores.
    model: the model.
    dataset_cfg: the task or mixture, its split and lengths, and the batch size.
    restore_checkpoint_cfg: one checkpoint.
    partitioner: shards arrays and computations over the devices.
    output_dir: the folder of all files.
    checkpoint_period: the number of batches in a chunk.
    shard_id: the index of this run's shard of the examples.
    num_shards: the number of runs that share the examples.
    merge_chunked_results: whether the chunks are merged into one file.
    write_fn: writes a chunk, as f(path, (outputs, aux), task's examples, mode, vocabulary).
    checkpoint_ds_iter: accepted as in T5X. A killed run finds its position by counting examples,
      which is exact for every pipeline.
    train_state_initializer_cls: builds the train state.
    fallback_init_rng: a seed to initialize parameters that the checkpoint lacks, if
      restore_checkpoint_cfg allows it.
    merge_fn: merges the chunks, as f(output_dir, file name, folder of the chunks, step).
    summarize_config_fn: called as f(model_dir, summary_writer, step) to write the configuration.
    verify_matching_vocabs_fn: checks the vocabularies of task and model; None for no check.
    output_vocab_feature_name: the task's feature with the vocabulary of the predictions.
    file_extension: replaces jsonl in the name of the result file.
    keep_aux_as_numpy: whether `write_fn` gets auxiliary values as arrays.
    use_orbax: accepted as in T5X; the checkpoint's layout is detected.
    input_length_buckets: shorter lengths for batches of short inputs; see `get_infer_fn`.

  Raises:
    ValueError: the arguments do not fit together, or an earlier run with other settings has left
      its chunks.
    OutOfMemoryError: a device has run out of memory; the text suggests what to change.
  """
  check_one_of("infer.mode", mode, result_files.MODES)
  output_dir = re.sub(r"(?<!gs:)/{2,}", "/", output_dir)
  result_files.check_output_dir("infer.output_dir", output_dir)
  _, paths = checkpoints.find_checkpoints([restore_checkpoint_cfg])
  buckets = inference.check_buckets(input_length_buckets, model)

  # Data, and the shapes of the state.
  data.check_same_files(dataset_cfg)
  if verify_matching_vocabs_fn is not None:
    verify_matching_vocabs_fn(dataset_cfg, model)
  digests = {} if verify_matching_vocabs_fn is None else data.vocabulary_digests(model)
  checkpoints.check_model(model, digests, restore_checkpoint_cfg)
  examples = InferenceData(dataset_cfg, model.FEATURE_CONVERTER_CLS, shard_id, num_shards)
  batch_size, spec = dataset_cfg.batch_size, examples.element_spec()
  shapes = {name: (batch_size, *x.shape) for name, x in spec.items()}
  initializer = train_state_initializer_cls(
    optimizer_def=None,  # The optimizer's state is not restored.
    init_fn=model.get_initial_variables,
    input_shapes=shapes,
    input_types={name: np.dtype(x.dtype.as_numpy_dtype) for name, x in spec.items()},
    partitioner=partitioner,
  )

  # State.
  init_rng = None if fallback_init_rng is None else jax.random.PRNGKey(fallback_init_rng)
  with explain_out_of_memory(INFERENCE[-1:]):
    state = initializer.from_checkpoint([restore_checkpoint_cfg], init_rng=init_rng)
    jax.block_until_ready(state)
  if shard_id == 0:
    summarize_config_fn(model_dir=output_dir, summary_writer=None, step=0)
    info_file = os.path.join(output_dir, "model-info.txt")
    log_model_info(info_file, initializer.global_train_state_shape, partitioner)

  # Results, task by task.
  infer_fn = functools.partial(
    inference.get_infer_fn(
      inference.inference_step(model, result_files.MODES[mode]),
      batch_size=batch_size,
      train_state_axes=initializer.train_state_axes,
      partitioner=partitioner,
      keep_aux_as_numpy=keep_aux_as_numpy,
      input_length_buckets=buckets,
      is_scoring=mode == "score",
      num_token_ids=data.token_limit(model),
    ),
    train_state=state,
  )
  settings = {
    "infer.mode": mode,
    "infer.checkpoint_period": checkpoint_period,
    "DatasetConfig.batch_size": batch_size,
    "DatasetConfig.split": dataset_cfg.split,
    "DatasetConfig.task_feature_lengths": dict(dataset_cfg.task_feature_lengths or {}),
    "RestoreCheckpointConfig.dtype": str(restore_checkpoint_cfg.dtype),
    "the checkpoint's step": int(state.step),
    "the checkpoint's content": checkpoints.fingerprint(paths[0]),
    "the data": describe_tasks(dataset_cfg),
    "the model": _model_settings(model),
  }
  if buckets:
    settings["infer.input_length_buckets"] = list(buckets)
  shard = f"{shard_id:05}-of-{num_shards:05}"
  with Watchdog() as watchdog:
    for task in examples.tasks:
      name = f"{task.name}-{mode}.{file_extension}-{shard}"
      results = result_files.TaskResults(
        os.path.join(output_dir, name), f"{output_dir}/tmp-{task.name}-{shard}", settings
      )
      if results.is_complete():
        terminal.print_line(
          f"{results.path} is complete: nothing was left to do. To compute it again, remove "
          f"{name}{result_files.COMPLETED} beside it"
        )
        continue
      with results.opened() as first, explain_out_of_memory(INFERENCE):
        vocabulary = task.output_features[output_vocab_feature_name].vocabulary
        write_chunk = functools.partial(results.write, write_fn, mode, vocabulary)
        chunks = examples.chunks(task, checkpoint_period * batch_size, first)
        _infer_task(infer_fn, chunks, write_chunk, watchdog)
        results.finish(int(state.step), merge_fn if merge_chunked_results else None)


def _infer_task(
  infer_fn: InferFn, chunks: Iterator[Any], write_chunk: Callable[..., None], watchdog: Watchdog
) -> None:
  """Computes the results of the chunks; each is written while the next is computed."""
  writer = result_files.FailFastThreadPoolExecutor(max_workers=1)
  try:
    for number, task_ds, model_ds in terminal.track(chunks, "inferring", unit="chunks"):
      started = time.monotonic()
      watchdog.set_phase(f"inferring chunk {number}")
      # Each chunk has its own key, so that a restarted run samples the same outputs.
      rng = jax.random.fold_in(jax.random.PRNGKey(0), number)
      result = infer_fn(model_ds.enumerate(), rng=rng)
      outputs, aux = result if isinstance(result, tuple) else (result, {})
      speed = len(outputs) / (time.monotonic() - started)
      terminal.print_line(f"chunk {number}: {len(outputs)} examples, {speed:.4g} a second")
      for note in inference.notes_on_tokens_left_behind(aux):
        terminal.print_line(f"note     chunk {number}: {note}")
      if jax.process_index() == 0:
        writer.submit(write_chunk, number, ([output for _, output in outputs], aux), task_ds)
    # The other processes wait for the first one, which writes.
    watchdog.set_phase("writing the last chunks")
  finally:
    writer.shutdown(wait=True)


def _model_settings(model: Any) -> dict[str, str]:
  """Returns the attributes of a model and of its network's configuration, as texts without addresses."""
  network = getattr(model, "network_config", None)
  attributes = {**vars(model), **(vars(network) if dataclasses.is_dataclass(network) else {})}
  # The module contains the configuration, and the optimizer does not change results.
  texts = {}
  for name in sorted(attributes.keys() - {"module", "optimizer_def"}):
    value = attributes[name]
    bound = config.bindings_of(value) if callable(value) else {}
    text = f"{value!r} with {bound!r}" if bound else repr(value)
    texts[name] = re.sub(r" at 0x\w+", "", text)
  return texts


def main(argv: Sequence[str] | None = None) -> None:
  """Runs `infer` with the arguments of the command line and its gin files (`python -m t5x.infer`)."""
  config.run_from_command_line(infer, argv, describe_run)
