"""Names that T5X's modules have because they import them, or because they are aliases of types.

Code written for T5X also uses these, such as `layers.param_with_axes` and `models.PyTreeDef`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flax import core
from flax.linen import partitioning
from jax.sharding import PartitionSpec

_FUNCTIONS = (
  "Activation Initializer InitializerAxis NdInitializer InferStepCallable MergeFn WriteFn"
)
_MAPPINGS = "ActionMapType BatchSpec BatchType FlaxMutables MetricMapSpec MetricMapType MetricsMap"
_MAPPINGS += " MetricValueMapType ModelWeights MutableMetricMapType"
_OTHER_TYPES = "Array DType Dtype HardwareMesh JaxDevice PRNGKey PyTree PyTreeDef Rng TrainState"

IMPORTED_NAMES: dict[str, Any] = {
  **dict.fromkeys(_FUNCTIONS.split(), Callable[..., Any]),
  **dict.fromkeys(_MAPPINGS.split(), Mapping[str, Any]),
  **dict.fromkeys(_OTHER_TYPES.split(), Any),
  "FrozenDict": core.FrozenDict,
  "FrozenVariableDict": core.FrozenDict,
  "PartitionSpec": PartitionSpec,
  "PartitionedCallable": Callable[..., Any],
  "Shape": tuple[int, ...],
  "VariableDict": core.FrozenDict | dict[str, Any],
  "freeze": core.freeze,
  "param_with_axes": partitioning.param_with_axes,
  "remat": partitioning.remat,
  "scan_with_axes": partitioning.scan_with_axes,
  "unfreeze": core.unfreeze,
  "with_sharding_constraint": partitioning.with_sharding_constraint,
}
