"""Names that T5X's modules have because they import them, aliases of types, and small private functions.

Code written for T5X also uses these, such as `layers.param_with_axes`, `models.PyTreeDef` and
`layers._normalize_axes`. Every module of `t5x` has all of them.
"""

import functools
from collections.abc import Iterable
from typing import Any

import jax
from absl import flags
from flax import core
from flax.linen import initializers, partitioning
from jax import lax
from jax.sharding import PartitionSpec

from rosetta_t5.networks.layers.dense import activation_function

# Types of functions, of dicts, of the results of background threads, and others.
_TYPES = """
  ActionMapType Activation Array ArrayMapFuture ArrayType BaseTrainerConstructor BatchSpec BatchType
  BatchesType CheckpointManagerConstructor CheckpointerConstructor CompiledPartitionedCallable
  CreateDecodingStateCallbackFn CreatePostprocessorFn CreatePreprocessorFn DType Dataset
  DecodeFnCallable DecoderParamsSpec Dtype EvaluatorConstructor FlaxMutables GetDatasetCallable
  GetEvalDatasetCallable Gradients HardwareMesh InferFnCallable InferStepCallable
  InferStepWithRngCallable InferStepWithoutRngCallable InferenceFn InitFnCallable Initializer
  InitializerAxis JaxDevice LearningRateCallable MergeFn MetricMapSpec MetricMapType
  MetricValueMapFuture MetricValueMapType MetricsMap ModelWeights MutableMetricMapType NdInitializer
  OptimizerDefType OptimizerStateType OptimizerType OtherMesh PRNGKey ParamTree PartitionedCallable
  PartitionedEvalCallable PartitionedTrainCallable PostprocessorFn PreprocessorFn PyTree PyTreeDef
  Pytree RestoreStateTransformationFn Rng SaveStateTransformationFn ScalarOrArrayType
  SummarizeConfigFn SummarizeMetricsCallable TimeFuture TokensIdsToLogitsCallable TpuMesh TrainState WarmupExample
  WarmupExamples WriteFn
"""

# Names that T5X imports from flax.
_FLAX_NAMES = {
  core: "FrozenDict freeze unfreeze",
  partitioning: "ScanIn param_with_axes remat scan_with_axes with_sharding_constraint",
}

IMPORTED_NAMES: dict[str, Any] = {
  **dict.fromkeys(_TYPES.split(), Any),
  **{name: getattr(x, name) for x, names in _FLAX_NAMES.items() for name in names.split()},
  "FLAGS": flags.FLAGS,
  "FrozenVariableDict": core.FrozenDict,
  "MutableVariableDict": core.scope.MutableVariableDict,
  "P": PartitionSpec,
  "PartitionSpec": PartitionSpec,
  "Shape": tuple[int, ...],
  "VariableDict": core.FrozenDict | dict[str, Any],
  "cached_property": functools.cached_property,
  "variance_scaling": initializers.variance_scaling,
  # Functions of T5X's layers and of its decoding, of which users' layers and decode functions are made.
  "_canonicalize_tuple": lambda x: tuple(x) if isinstance(x, Iterable) else (x,),
  "_convert_to_activation_function": activation_function,
  "_dynamic_update_vector_slice_in_dim": jax.vmap(
    lax.dynamic_update_slice_in_dim, in_axes=(0, 0, 0, None)
  ),
  "_is_tracer": lambda value: isinstance(value, jax.core.Tracer),
  "_normalize_axes": lambda axes, ndim: tuple(axis % ndim for axis in axes),
  "dynamic_vector_slice_in_dim": jax.vmap(lax.dynamic_slice_in_dim, in_axes=(None, 0, None, None)),
}
