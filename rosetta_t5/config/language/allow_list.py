"""What a gin file from elsewhere may import, call and name, and what a model file may contain.

Gin calls whatever a file refers to, and reaches every attribute of the modules that it imports:
`@seqio.os.system()`. A file that somebody else wrote is therefore limited to the functions and classes
below. They are compared as objects, so the path by which a file reaches them does not matter.
"""

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import gin
from gin.config import Configurable

from rosetta_t5.config.language import gin_internals
from rosetta_t5.config.t5x_surface import RUN_FUNCTION_MODULES
from rosetta_t5.user_errors import ConfigError

# The names in each module that gin may call. Whatever their arguments are, they only compute: none of
# them imports, writes, deletes, sends, or calls anything but the functions that it gets as arguments.
CALLED = {
  "jax.nn": "gelu relu sigmoid silu softplus tanh",
  "jax.nn.initializers": "constant lecun_normal normal ones truncated_normal uniform "
  "variance_scaling xavier_uniform zeros",
  "optax": "*",
  "optax.contrib": "*",
  "rosetta_t5.adapters": "BitFit IA3 LoRA Norms PromptTuning",
  "rosetta_t5.data": "chat_task file_task gpt2_vocabulary known_task mixture prepared_task "
  "tokenizer_vocabulary",
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
  "t5x.models": "DecoderOnlyModel DecoderParams DualEncoderModel EncoderDecoderModel "
  "get_input_vocabulary get_output_vocabulary",
  "t5x.optimizers": "SpikeGuard adabelief adagrad adam adamw all_except average_parameters chain dpsgd "
  "fromage lamb lars lion muon noisy_sgd precondition_by_kfac radam rmsprop scale_by_name sgd shampoo soap sophia yogi",
  "t5x.partitioning": "PjitPartitioner standard_logical_axis_rules",
  "t5x.te_helper": "TransformerEngineConfig",
  "t5x.trainer": "EarlyStoppingAction TerminateOnNanAction",
  "t5x.utils": "CheckpointConfig DatasetConfig RestoreCheckpointConfig SaveCheckpointConfig "
  "create_learning_rate_scheduler round_vocab_size_to_multiple",
}
# The names that gin may pass as arguments but not call, because they may write files or import modules.
NAMED = {
  "seqio": "Evaluator JSONLogger PyLoggingLogger TensorBoardLogger",
  "rosetta_t5.telemetry.trackers": "AimWriter MlflowWriter WandbWriter",
  "t5x.checkpoints": "Checkpointer SaveBestCheckpointer",
  "t5x.contrib.moe.checkpoints": "UpcycleCheckpointer",
  "t5x.contrib.moe.trainer": "MoeTrainer",
  "t5x.export_lib": "ExportableModule create_batch_polymorphic_shapes create_inference_function "
  "create_postprocessor create_preprocessor create_preprocessor_from_task write_warmup_examples",
  "t5x.gin_utils": "summarize_gin_config",
  "t5x.trainer": "Trainer",
  "t5x.utils": "LegacyCheckpointManager TrainStateInitializer get_dataset "
  "get_infer_fn get_training_eval_datasets get_vocabulary verify_matching_vocabs",
}
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


# The classes that keep what they get and call none of it.
_KEEPERS = ("CheckpointConfig", "RestoreCheckpointConfig", "SaveCheckpointConfig")
IMPORTABLE = frozenset([*CALLED, *NAMED, *_OTHER_MODULES])
_ADVICE = "this file may be from elsewhere\n  if you trust it, add --trust"


@contextlib.contextmanager
def limited_to_list(is_limited: bool = True) -> Iterator[None]:
  """Inside the `with`, gin files can use only what is listed here, unless `is_limited` is False."""
  from rosetta_t5.data.dataset_config import importable

  token = importable.set(IMPORTABLE if is_limited else importable.get())
  try:
    yield
  finally:
    importable.reset(token)


def _is_limited() -> bool:
  from rosetta_t5.data.dataset_config import importable

  return importable.get() is not None


def check_import(module: str) -> None:
  """Raises ConfigError if the file that is being bound may not import a module."""
  if module not in IMPORTABLE and _is_limited():
    raise ConfigError(f"the module {module!r} is not imported: {_ADVICE}")


def check_binding(configurable: Configurable | None, value: Any) -> None:
  """Raises ConfigError if the file that is being bound may not set an argument to a value.

  Args:
    configurable: the function, class or method that has the argument; None for a macro.
    value: the value, with gin's references. What may write files may be given only to what does not call
      it while a command builds a run: the run itself, and the classes of `_KEEPERS`.
  """
  if not _is_limited():
    return
  calls_nothing = False
  if configurable is not None:
    if configurable.is_method:  # It belongs to a class, which decides.
      (configurable,) = gin_internals.find_configurables(configurable.module)
    is_named = configurable.name in RUN_FUNCTION_MODULES or name_in(NAMED, configurable.wrapped)
    calls_nothing = bool(is_named) or configurable.name in _KEEPERS
    if not is_named:
      _check_is_called(configurable)
  for reference in gin.config.iterate_references(value):
    is_passed_on = calls_nothing and not reference.evaluate
    if not (is_passed_on and name_in(NAMED, reference.configurable.wrapped)):
      _check_is_called(reference.configurable)


def _check_is_called(configurable: Configurable) -> None:
  if configurable.module != "gin" and not name_in(CALLED, configurable.wrapped):
    name = configurable.selector
    raise ConfigError(f"{name} is not on the list of what may be called: {_ADVICE}")


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


def name_in(table: Mapping[str, str], function: Any) -> str | None:
  """Returns the full name of a function or class in CALLED or NAMED; None if it is not listed."""
  # Gin and JAX wrap some of the functions.
  same = (n for n, f in _listed(table).items() if inspect.unwrap(f) is inspect.unwrap(function))
  return next(same, None)


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
