"""T5X's names for the types of functions and classes that users write themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import jax

PyTree = Any
Batch = Mapping[str, jax.Array]
Metrics = Mapping[str, Any]

# fn(state_dict, parameter_infos) → (state_dict, parameter_infos), both changed, before a save.
SaveStateTransformationFn = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
# fn(state_dict, target_state_dict, *, is_resuming=False) → the restored state_dict, changed.
RestoreStateTransformationFn = Callable[..., PyTree]
# Returns a checkpointer; it takes the arguments of `Checkpointer`.
CheckpointerConstructor = Callable[..., Any]
# Returns a checkpoint manager; it takes the arguments of `OrbaxCheckpointManagerInterface`.
CheckpointManagerConstructor = Callable[..., Any]

# Returns the training data of a shard; it takes the arguments of `get_dataset`.
GetDatasetCallable = Callable[..., Any]
# fn(cfg, shard_id, num_shards, eval_steps, feature_converter_cls) → {task: dataset for the loss}.
GetEvalDatasetCallable = Callable[..., Mapping[str, Any]]

ArrayMapFuture = Future[Mapping[str, jax.Array]]
MetricValueMapFuture = Future[Mapping[str, Any]]
TimeFuture = Future[float]

# fn(step) → the learning rate of step number `step`, counted from 0.
LearningRateCallable = Callable[[jax.Array], jax.Array]
# fn(metrics, duration in seconds, num_steps) → values of metrics accumulated over several steps.
SummarizeMetricsCallable = Callable[[Metrics, float, int], Mapping[str, jax.Array]]
# fn(train_state, batch) → the new state and the batch's metrics.
PartitionedTrainCallable = Callable[[Any, Batch], tuple[Any, Metrics]]
# fn(train_state, batch) → the batch's metrics.
PartitionedEvalCallable = Callable[[Any, Batch], Metrics]
# Returns a trainer; it takes the arguments of `BaseTrainer`.
BaseTrainerConstructor = Callable[..., Any]
# fn(rng, input_shapes, input_types) → a module's initial variables by collection.
InitFnCallable = Callable[..., Mapping[str, PyTree]]

# fn(params, batch, rng=None) → predictions or scores of a batch.
InferStepWithRngCallable = Callable[..., PyTree]
# fn(params, batch) → predictions or scores of a batch.
InferStepWithoutRngCallable = Callable[[PyTree, Batch], PyTree]
# fn(dataset, train_state, rng=None) → (index, output) pairs; with auxiliary values, (pairs, values).
InferFnCallable = Callable[..., Any]
# Returns an evaluator of predictions; it takes the arguments of `seqio.Evaluator`.
EvaluatorConstructor = Callable[..., Any]
