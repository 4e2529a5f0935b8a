"""What a gin file from elsewhere may import, call and name, and what a model file may contain.

Gin calls whatever a file refers to, and reaches every attribute of the modules that it imports:
`@seqio.os.system()`. A file that somebody else wrote is therefore limited to the functions and classes
below. They are compared as objects, so the path by which a file reaches them does not matter.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import sys
import types
from collections.abc import Mapping
from typing import Any

from gin.config import Configurable

from rosetta_t5.config.t5x.run_functions import RUN_FUNCTION_MODULES
from rosetta_t5.user_errors import ConfigError

# The names in each module that gin may call. Whatever their arguments are, they only compute: none of
# them writes, deletes, sends, or calls anything but the functions that it gets as arguments.
CALLED = types.MappingProxyType(
  {
    "jax.nn": "gelu relu sigmoid silu softplus tanh",
    "jax.nn.initializers": "constant lecun_normal normal ones truncated_normal uniform "
    "variance_scaling xavier_uniform zeros",
    "optax": "*",
    "optax.contrib": "*",
    "rosetta_t5.data": "file_task gpt2_vocabulary known_task mixture prepared_task tokenizer_vocabulary",
    "rosetta_t5.data.tasks.stdlib_docs": "vocabulary",
    "rosetta_t5.data.tasks.file_task": "create_task_from_tfexample_file",
    "seqio": "ByteVocabulary ContinuousFeature DecoderFeatureConverter EncDecFeatureConverter "
    "Feature LMFeatureConverter PassThroughFeatureConverter PassThroughVocabulary "
    "PrefixLMFeatureConverter SentencePieceVocabulary",
    "t5x.adafactor": "Adafactor HParamMap HeuristicRule standard_logical_factor_rules",
    "t5x.contrib.gpu.t5.network": "T5Config Transformer",
    "t5x.contrib.moe.adafactor_utils": "logical_factor_rules",
    "t5x.contrib.moe.models": "MoeDecoderOnlyModel MoeEncoderDecoderModel",
    "t5x.contrib.moe.partitioning": "MoePjitPartitioner standard_logical_axis_rules",
    "t5x.decoding": "beam_search temperature_sample",
    "t5x.examples.decoder_only.network": "DecoderWrapper TransformerConfig",
    "t5x.examples.scalable_t5.network": "T5Config Transformer",
    "t5x.examples.t5.network": "T5Config Transformer",
    "t5x.gin_utils": "bool_fn steps_of string_split_fn sum_fn",
    "t5x.models": "DecoderOnlyModel DecoderParams EncoderDecoderModel get_input_vocabulary "
    "get_output_vocabulary",
    "t5x.optimizers": "SpikeGuard adabelief adagrad adam adamw all_except amos average_parameters chain dpsgd "
    "fromage lamb lars lion muon noisy_sgd precondition_by_kfac radam rmsprop scale_by_name sgd shampoo soap sophia yogi",
    "t5x.partitioning": "PjitPartitioner standard_logical_axis_rules",
    "t5x.te_helper": "TransformerEngineConfig",
    "t5x.trainer": "EarlyStoppingAction TerminateOnNanAction",
    "t5x.utils": "CheckpointConfig DatasetConfig RestoreCheckpointConfig SaveCheckpointConfig "
    "create_learning_rate_scheduler get_vocabulary round_vocab_size_to_multiple "
    "verify_matching_vocabs",
  }
)
# The names that gin may pass as arguments but not call, because they may write files.
NAMED = types.MappingProxyType(
  {
    "seqio": "Evaluator JSONLogger PyLoggingLogger TensorBoardLogger",
    "rosetta_t5.telemetry.trackers": "AimWriter WandbWriter",
    "t5x.checkpoints": "Checkpointer SaveBestCheckpointer",
    "t5x.contrib.moe.checkpoints": "UpcycleCheckpointer",
    "t5x.contrib.moe.trainer": "MoeTrainer",
    "t5x.export_lib": "ExportableModule create_batch_polymorphic_shapes create_inference_function "
    "create_postprocessor create_preprocessor create_preprocessor_from_task write_warmup_examples",
    "t5x.gin_utils": "summarize_gin_config",
    "t5x.trainer": "Trainer",
    "t5x.utils": "LegacyCheckpointManager TrainStateInitializer get_dataset "
    "get_deterministic_dataset get_infer_fn get_training_eval_datasets",
  }
)
# Modules that define the run functions or register tasks.
_OTHER_MODULES = (
  "__gin__.dynamic_registration",
  "__main__",
  "jax",
  "t5.data.mixtures",
  "t5.data.tasks",
  "t5x",
  "t5x.contrib.gpu.scripts_gpu.seqio_tasks",
  "t5x.eval",
  "t5x.infer",
  "t5x.scripts_gpu.seqio_tasks",
  "t5x.train",
)


@dataclasses.dataclass(frozen=True)
class AllowList:
  """What one file that somebody else may have written can use.

  Attributes:
    modules: the modules that the user allows in addition, with all that they define.
    uncalled: if given, what else a file names is not refused but added to this list. The caller then
      builds nothing. Modules are imported, because the working directory is not among their folders.
  """

  modules: tuple[str, ...] = ()
  uncalled: list[str] | None = None

  @property
  def importable(self) -> frozenset[str]:
    """The names of the modules that may be imported."""
    return frozenset([*CALLED, *NAMED, *_OTHER_MODULES, *self.modules])

  def check_import(self, module: str) -> None:
    """Raises ConfigError if a file may not import a module."""
    if module in self.importable or (self.uncalled is not None and _is_installed(module)):
      return
    raise ConfigError(
      f"the module {module!r} is not imported, because this file may be from elsewhere\n  "
      f"{_module_advice(module)}if you trust the file, add --trust"
    )

  def check_binding(self, configurable: Configurable) -> None:
    """Raises ConfigError if a file may not set an argument of a function, class or method."""
    function = configurable.wrapped
    is_run = configurable.name in RUN_FUNCTION_MODULES
    if not (is_run or is_only_named(function) or _is_method_of_listed(function)):
      self.check_reference(configurable, is_evaluated=True)

  def check_reference(self, configurable: Configurable, is_evaluated: bool) -> None:
    """Raises ConfigError if a file may not refer to a function or class, or not with `()`."""
    function = configurable.wrapped
    defined_in = getattr(function, "__module__", None)
    is_users = any(f"{defined_in}.".startswith(f"{module}.") for module in self.modules)
    is_named = is_only_named(function) and not is_evaluated
    if configurable.module == "gin" or is_users or is_named or public_name(function):
      return
    if self.uncalled is not None:
      self.uncalled.append(
        f"{configurable.selector} is not called: this file may be from elsewhere (--trust)"
      )
      return
    if is_only_named(function):
      raise ConfigError(
        f"@{configurable.selector}() is not called, because this file may be from elsewhere\n  remove the "
        "parentheses or, if you trust the file, add --trust"
      )
    raise ConfigError(
      f"{configurable.selector} is not used: this file may be from elsewhere, and such files are "
      f"limited to a list of functions and classes\n  {_module_advice(defined_in)}if you trust the "
      "file, add --trust"
    )


def _is_installed(module: str) -> bool:
  try:
    return importlib.util.find_spec(module) is not None
  except ImportError:
    return False


def _module_advice(module: str | None) -> str:
  """Returns how to allow what a module of the user's own defines."""
  if module is None or module.partition(".")[0] in sys.stdlib_module_names:
    return ""
  return f"if {module} is your own module, add --module {module}; "


# For files that the user has not allowed anything more.
STRICT = AllowList()


def is_only_named(function: Any) -> bool:
  """Returns whether a function or class is listed as an argument that gin must not call."""
  return _name_in(NAMED, function) is not None


def public_name(function: Any) -> str | None:
  """Returns the full name of a function or class that gin may call; None if it is not listed."""
  return _name_in(CALLED, function)


def find_public(name: str) -> Any:
  """Returns the listed function or class of a full name, such as t5x.models.EncoderDecoderModel.

  Raises:
    ConfigError: it is not listed.
  """
  module, _, short = name.rpartition(".")
  listed = _listed_in(module, CALLED[module]) if module in CALLED else {}
  if short not in listed:
    raise ConfigError(f"{name!r} is not a function or class that this file may name")
  return listed[short]


def _name_in(table: Mapping[str, str], function: Any) -> str | None:
  # Gin and JAX wrap some of the functions.
  same = (n for n, f in _listed(table).items() if inspect.unwrap(f) is inspect.unwrap(function))
  return next(same, None)


def _is_method_of_listed(function: Any) -> bool:
  name = getattr(function, "__name__", "")
  classes = filter(inspect.isclass, _listed(CALLED).values())
  return any(getattr(each, name, None) is function for each in classes)


def _listed(table: Mapping[str, str]) -> dict[str, Any]:
  """Returns the listed functions and classes by their full names.

  Those of a module that has not been imported are left out, because no gin file can refer to them. The
  modules of t5x are imported, because their contents can also be reached through others.
  """
  return {
    f"{module}.{name}": found
    for module, names in table.items()
    if module in sys.modules or module.startswith("t5x.")
    for name, found in _listed_in(module, names).items()
  }


@functools.cache
def _listed_in(module_name: str, names: str) -> dict[str, Any]:
  module = importlib.import_module(module_name)
  return {
    name: getattr(module, name)
    for name in (_transformations_and_schedules(module) if names == "*" else names.split())
  }


def _transformations_and_schedules(optax: Any) -> list[str]:
  """Returns the names of Optax's functions that make gradient transformations or schedules.

  Args:
    optax: the package, or `optax.contrib`.
  """

  def is_one(name: str) -> bool:
    function = getattr(optax, name)
    result = str(getattr(function, "__annotations__", {}).get("return"))
    return inspect.isfunction(function) and ("GradientTransf" in result or "Callable[[" in result)

  unannotated = ("nadam", "nadamw", "scale_by_factored_rms")
  return [name for name in dir(optax) if name in unannotated or is_one(name)]
