"""A training run, from top to bottom: seeds, data, state, trainer, loop."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from rosetta_t5 import checkpoints, config, data, distributed, out_of_memory, terminal
from rosetta_t5.argument_types import FolderName, NonNegative, Positive, Seed, Steps
from rosetta_t5.distributed.coordination import CHANGES_NUMBERS
from rosetta_t5.inference.evaluation import LossEvaluation, PredictionEvaluation
from rosetta_t5.models import BaseModel
from rosetta_t5.networks.kernel_measurement import with_measured_kernel
from rosetta_t5.networks.precision import choose_fp8, describe_computation, with_fp8
from rosetta_t5.parallel import BasePartitioner
from rosetta_t5.plan.description import describe_run
from rosetta_t5.telemetry import console
from rosetta_t5.telemetry.run_metrics import RunMetrics
from rosetta_t5.traced.program import flops_of_training
from rosetta_t5.train_loop import TrainLoop
from rosetta_t5.training import TrainState
from rosetta_t5.training.actions import ActionMode, BaseAction
from rosetta_t5.training.losses import microbatch_warning


@checkpoints.exclusive_model_dir
def train(
  *,
  model: BaseModel,
  train_dataset_cfg: data.DatasetConfig,
  train_eval_dataset_cfg: data.DatasetConfig | None,
  infer_eval_dataset_cfg: data.DatasetConfig | None,
  checkpoint_cfg: checkpoints.CheckpointConfig,
  partitioner: BasePartitioner,
  trainer_cls: Callable[..., Any],
  model_dir: FolderName,
  total_steps: Steps,
  eval_steps: Positive,
  eval_period: NonNegative,
  relative_steps: Steps | None = None,
  stats_period: NonNegative | None = None,
  random_seed: Seed | None,
  use_hardware_rng: bool = False,
  summarize_config_fn: Callable[[str, Any, int], None],
  inference_evaluator_cls: Any = None,
  get_dataset_fn: Callable[..., Any] = data.get_dataset,
  concurrent_metrics: bool = True,
  actions: Mapping[ActionMode | str, Sequence[BaseAction]] | None = None,
  train_eval_get_dataset_fn: Callable[..., Any] = data.get_training_eval_datasets,
  run_eval_before_training: bool = False,
  train_state_initializer_cls: Any = checkpoints.TrainStateInitializer,
  use_orbax: bool = True,
  verify_matching_vocabs_fn: Callable[..., None] | None = data.verify_matching_vocabs,
  gc_period: NonNegative = 0,
  te_config_cls: Any = None,
  num_eval_samples: NonNegative = 3,
) -> tuple[int, TrainState]:
  """Trains a model, from the latest checkpoint in MODEL_DIR if there is one.

  Args:
    model: the model.
    train_dataset_cfg: the training data.
    train_eval_dataset_cfg: the data on which the loss is evaluated; None for no such evaluation.
    infer_eval_dataset_cfg: the data on which predictions are evaluated; None for none.
    checkpoint_cfg: which checkpoints are saved, and where to start if MODEL_DIR has no checkpoint.
    partitioner: shards arrays and computations over the devices.
    trainer_cls: builds the trainer, such as `training.Trainer` with a schedule bound.
    model_dir: the folder for checkpoints, metrics and the configuration.
    total_steps: the number of optimizer steps completed when the run ends.
    eval_steps: the number of batches of an evaluation.
    eval_period: steps between evaluations.
    relative_steps: the number of steps of this run; overrides total_steps.
    stats_period: steps between reports of metrics; None for eval_period, or a twentieth of the run
      if that is less.
    random_seed: seeds initialization and dropout. None draws a seed and stores it in the
      checkpoints.
    use_hardware_rng: whether to use a faster random number generator whose numbers depend on the
      devices. It is also used if random_seed is None.
    summarize_config_fn: called as f(model_dir, summary_writer, step) to write the configuration.
    inference_evaluator_cls: evaluates the predictions, such as `seqio.Evaluator` with loggers bound;
      None for an evaluator that writes TensorBoard and JSON files.
    get_dataset_fn: builds the training dataset, which must repeat without end.
    concurrent_metrics: whether training continues while metrics of predictions are computed; actions
      then see them at the next evaluation.
    actions: users' actions by mode; they see metrics and can end the run.
    train_eval_get_dataset_fn: builds the evaluation datasets.
    run_eval_before_training: whether to evaluate before the first step.
    train_state_initializer_cls: builds the train state.
    use_orbax: accepted as in T5X; checkpoints are always in Orbax's layout.
    verify_matching_vocabs_fn: checks the vocabularies of task and model; None for no check.
    gc_period: steps between garbage collections, which are otherwise disabled; 0 leaves Python's
      automatic garbage collection enabled.
    te_config_cls: builds the `TransformerEngineConfig` that enables fp8 (NVIDIA's T5X); None for no
      fp8.
    num_eval_samples: the number of examples of each task that are shown with their predictions at
      each evaluation, on the console and in MODEL_DIR/samples.jsonl. Where only the loss is
      evaluated, a few held-out rows are decoded for it. 0 shows none.

  Returns:
    (the number of completed steps, the train state).

  Raises:
    ValueError: the arguments do not fit together, or another run trains in model_dir; no file has been
      overwritten.
    OutOfMemoryError: a device has run out of memory; the text suggests what to change.
    NonFiniteError: the loss or a gradient became NaN or infinite.
    RunInterrupted: SIGTERM or SIGUSR1 was received. The state is saved, and the exit status is 143.
  """
  run_started = time.monotonic()
  fp8 = choose_fp8(te_config_cls)
  model = with_fp8(model, fp8)

  # Seeds. Those that are drawn are stored in the checkpoints, so that a restart uses them again.
  end = None if relative_steps else total_steps
  save_cfg, verify = checkpoint_cfg.save, verify_matching_vocabs_fn
  restore_cfg, restore_path = checkpoints.find_start_checkpoint(checkpoint_cfg, model_dir, end)
  earlier_facts = checkpoints.read_start_facts(model_dir, restore_path)
  if use_hardware_rng or random_seed is None:
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
  drawn = distributed.draw_seed()
  seed = earlier_facts.get("random_seed", drawn) if random_seed is None else random_seed
  data_seed = data.resolve_seed(train_dataset_cfg, earlier_facts.get("train_dataset_seed", drawn))
  init_rng, trainer_rng = jax.random.split(jax.random.PRNGKey(seed), 2)

  # The first half of the header. TensorFlow needs seconds until the other half is known.
  setup = console.describe_setup(partitioner, train_dataset_cfg, save_cfg, model_dir)
  terminal.print_line(setup)

  # Data. The feed draws its first batch in the background, and the evaluations read their data.
  train_cfg = dataclasses.replace(train_dataset_cfg, seed=data_seed)
  data.check_same_files(train_cfg, train_eval_dataset_cfg, infer_eval_dataset_cfg)
  facts: dict[str, Any] = {"random_seed": seed, "train_dataset_seed": data_seed}
  digests = data.vocabulary_digests(model) if verify is not None else {}
  checkpoints.check_model(model, digests, restore_cfg)
  if verify is not None:
    verify(train_cfg, model)
    facts[checkpoints.VOCABULARIES] = digests
  if restore_path and (source := checkpoints.read_source_config(restore_path)):
    facts[checkpoints.SOURCE_CONFIG] = source
  feed = data.training_feed(get_dataset_fn, train_cfg, model, partitioner, checkpoint_cfg)
  describe_examples = data.check_examples(train_cfg, get_dataset_fn)
  model, kernel = with_measured_kernel(model, feed.element_spec, partitioner.mesh.shape)
  evaluation = LossEvaluation(
    cfg=train_eval_dataset_cfg,
    get_datasets=train_eval_get_dataset_fn,
    num_batches=eval_steps,
    model=model,
    partitioner=partitioner,
  )
  predictions = PredictionEvaluation(
    infer_eval_dataset_cfg, inference_evaluator_cls, model, partitioner, model_dir, verify
  )

  # State: restored from MODEL_DIR, else from the checkpoint to start from, else initialized.
  initializer = train_state_initializer_cls(
    optimizer_def=model.optimizer_def,
    init_fn=model.get_initial_variables,
    input_shapes=jax.tree.map(lambda spec: spec.shape, feed.element_spec),
    input_types=jax.tree.map(lambda spec: spec.dtype, feed.element_spec),
    partitioner=partitioner,
  )
  with out_of_memory.explain_out_of_memory(out_of_memory.INITIALIZATION):
    out_of_memory.check_state_fits(initializer, partitioner)
    state, manager = checkpoints.create_checkpoint_manager_and_restore(
      initializer, partitioner, restore_cfg, restore_path, init_rng, save_cfg, model_dir, feed
    )
    state = initializer.from_scratch(init_rng) if state is None else state
    first_step = int(jax.block_until_ready(state).step)
  # The step at which the run began, and the one from which relative_steps counts; a restart finds them.
  facts["first_step"] = earlier_facts.get("first_step", first_step)
  if relative_steps:
    facts["relative_to"] = earlier_facts.get("relative_to", first_step)
    total_steps = facts["relative_to"] + relative_steps
  if manager is not None:
    # A finetuning run keeps the checkpoint with which it began, also after a restart.
    given = checkpoint_cfg.restore and checkpoint_cfg.restore.paths()
    base = (earlier_facts.get(checkpoints.STARTED_FROM) or manager.restored_from) if given else None
    facts |= checkpoints.adapter_facts(model.adapter, manager, state.params, earlier_facts)
    manager.begin_run({**facts, checkpoints.STARTED_FROM: base})

  # Trainer. It owns the state from here on: each step donates the state before it.
  trainer = trainer_cls(
    model=model,
    train_state=state,
    partitioner=partitioner,
    eval_names=evaluation.task_names(),
    summary_dir=model_dir,
    train_state_axes=initializer.train_state_axes,
    rng=trainer_rng,
  )
  del state
  params, steps = trainer.train_state.params, (first_step, total_steps)
  flops = flops_of_training(model, params, feed.element_spec)
  restored_from = manager.restored_from if manager is not None else None
  rows = [("examples", text) for text in describe_examples(total_steps - first_step)]
  if computation := describe_computation(model, fp8, kernel):
    rows.append(("computes", computation))
  rows += [("note", text) for text in _header_notes(model, model_dir, trainer)]
  description = console.describe_training(model, params, flops, steps, restored_from, rows)
  terminal.print_line(description)

  # Loop. The step compiles while the feed draws its first batch.
  loop = TrainLoop(
    model=model,
    trainer=trainer,
    train_state_axes=initializer.train_state_axes,
    feed=feed,
    evaluation=evaluation,
    predictions=predictions,
    concurrent_metrics=concurrent_metrics,
    manager=manager if save_cfg else None,
    actions=actions,
    measure_run=RunMetrics(flops, feed.element_spec, partitioner.mesh, facts["first_step"]),
    model_dir=model_dir,
    first_step=first_step,
    total_steps=total_steps,
    run_started=run_started,
    save_cfg=save_cfg,
    eval_period=eval_period,
    stats_period=stats_period,
    gc_period=gc_period,
    run_eval_before_training=run_eval_before_training,
    num_eval_samples=num_eval_samples,
  )
  if first_step < total_steps:
    header = f"{setup}\n{description}"
    console.log_start(model_dir, header, partitioner.mesh, feed.element_spec, steps)
    with loop.log_failure(), out_of_memory.explain_out_of_memory(out_of_memory.TRAINING):
      loop.compile()
      info = os.path.join(model_dir, "model-info.txt")
      console.log_model_info(info, trainer.train_state, partitioner)
      summarize_config_fn(model_dir, trainer.train_metrics_manager.summary_writer, first_step)
      loop.run()
  return loop.finish()


def main(argv: Sequence[str] | None = None) -> None:
  """Runs `train` with the arguments of the command line and its gin files (`python -m t5x.train`)."""
  config.run_from_command_line(train, argv, describe_run)


def _header_notes(model: Any, model_dir: str, trainer: Any) -> list[str]:
  notes = [f"changed since the last run: {line}" for line in config.changes_since(model_dir)]
  changing = filter(os.environ.get, CHANGES_NUMBERS)
  notes += [f"{name}={os.environ[name]} may change the numbers of the run" for name in changing]
  return notes + microbatch_warning(model.loss_normalizing_factor, trainer.num_microbatches)
