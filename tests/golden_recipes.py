"""Describes what each recipe configures in a short text: gin's bindings, model shapes, schedule.

`python tests/golden_recipes.py` (or `make golden`) rewrites the texts of all recipes in tests/golden.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import math
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import gin
import jax
from gin.config import ConfigurableReference

from rosetta_t5.config.binding_checks import EXAMPLES
from rosetta_t5.config.language.binding import bind, bound_arguments
from rosetta_t5.config.language.gin_internals import all_bindings
from rosetta_t5.config.language.statements import Macro, read_program
from rosetta_t5.config.t5x_surface import RECIPES
from rosetta_t5.data.tensorflow_import import import_seqio

GOLDEN = pathlib.Path(__file__).parent / "golden"
# Values for what recipes leave open: these, and the examples that error messages give.
VALUES = {
  "FEATURE_LENGTHS": "{'inputs': 512, 'targets': 128}",
  "MODEL_NAME": "'/ml/name'",
  "MODEL_OUTPUT_DIR": "'/path/for/results'",
  "TF_EXAMPLE_FILE_PATHS": "['/path/to/examples.tfrecord']",
  "TF_EXAMPLE_FILE_TYPE": "'tfrecord'",
  "TRAIN_EVAL_MIXTURE_OR_TASK_NAME": "'name_of_a_seqio_task'",
} | EXAMPLES
# The recipe that is included before one that is neither a whole model nor a run.
INCLUDED_BEFORE = {
  "examples/finetune_chat": "models/llama3/1b",
  "examples/finetune_rows": "models/flan_t5/base",
  "models/local_tiny": "examples/base_wmt_finetune",
  "models/loss_vocabulary_optimizer": "models/t5_1_1/base",
  "models/mt5/vocabulary": "models/t5_1_1/base",
  "models/scalable_t5/local_tiny": "examples/scalable_t5/wmt19_ende_from_scratch",
  "models/t5_1_1/adamw_opt": "models/t5_1_1/base",
  "models/umt5/architectures/encoder_decoder": "models/umt5/base",
  "models/umt5/optimizer/adafactor": "models/umt5/base",
  "models/umt5/optimizer/adafactor_momentum_nofactor": "models/umt5/base",
  "models/umt5/runs/finetuning_common": "models/umt5/base",
  "models/umt5/runs/pretraining_common": "models/umt5/base",
  "models/umt5/vocab": "models/scalable_t5/t5_1_1/base",
} | {
  f"optimizers/{file.stem}": "models/t5_1_1/small"
  for file in (RECIPES / "optimizers").glob("*.gin")
}
KINDS = ("models", "optimizers", "runs", "examples")
RUNS = ("train", "evaluate", "infer", "precompile", "save")
PARAMETERS = "parameters: "  # how the line about them begins
SCHEDULE_STEPS = (0, 1_000, 10_000, 100_000, 1_010_000)
_traced: dict[Any, dict[str, tuple[int, ...]]] = {}


def every_recipe() -> list[str]:
  """Returns the names of all recipes, such as models/t5_1_1/small."""
  return sorted(str(file.relative_to(RECIPES).with_suffix("")) for file in RECIPES.rglob("*.gin"))


def golden_text(name: str, with_parameters: bool = True) -> str:
  """Returns the golden text of a recipe; without its parameters, nothing is traced.

  The text of a fragment has only what differs from the recipe before it, and the text of an example
  only what differs from its run with T5 1.1 base. Both always contain the parameters and the schedule.
  """
  before, compared_with = (), ()
  if name in INCLUDED_BEFORE:
    before = compared_with = (INCLUDED_BEFORE[name],)
  elif name.startswith("runs/moe/"):
    before = ("models/moe/switch_base_8",)
  elif name.startswith("runs/"):
    before = ("models/t5_1_1/base",)
  elif name.startswith("examples/"):
    compared_with = ("models/t5_1_1/base", _run_of(name))
  known = set(_recipe_lines(*compared_with)) if compared_with else set()
  *lines, schedule = _recipe_lines(*before, name)
  changed = [line for line in lines if line not in known]
  head = [f"as {' with '.join(compared_with)}"] if compared_with else []
  if with_parameters:
    resolve(*before, name)
    changed.append(f"{PARAMETERS}{_parameters_text()}")
  return "\n".join([name, *(f"  {line}" for line in (*head, *changed, schedule))])


def read_golden(file: pathlib.Path) -> dict[str, str]:
  """Returns the golden texts in a file, by recipe."""
  texts = file.read_text(encoding="utf-8").strip().split("\n\n")
  return {golden.splitlines()[0]: golden for golden in texts}


def write_golden() -> None:
  """Writes the texts of all recipes, one file for each of `KINDS`."""
  for kind in KINDS:
    texts = [golden_text(name) for name in every_recipe() if name.startswith(f"{kind}/")]
    (GOLDEN / f"{kind}.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")


def _run_of(name: str) -> str:
  """Returns the run that an example includes last."""
  bindings = read_program([str(RECIPES / f"{name}.gin")]).all_bindings()
  files = [b.source.file for b in bindings]
  return [f for f in files if f.startswith("gin/runs/")][-1].removeprefix("gin/")[: -len(".gin")]


@functools.cache
def _recipe_lines(*names: str) -> tuple[str, ...]:
  resolve(*names)
  return (*_binding_lines(), f"schedule: {_schedule_text()}")


def resolve(*names: str) -> None:
  """Binds recipes, the last one taking precedence, and a value for everything that they leave open."""
  import_seqio()  # quietly, and before a recipe does
  gin.clear_config()
  files = [str(RECIPES / f"{name}.gin") for name in names]
  effective = read_program(files).effective_bindings().values()
  left_open = [b.name for b in effective if b.value == Macro("gin.REQUIRED")]
  program = read_program(files, [f"{name} = {VALUES[name]}" for name in left_open])
  bind(program).raise_if_any()


def _binding_lines() -> list[str]:
  """Returns the run's arguments with all that they refer to, and then all other bindings."""
  seen: set[tuple[str, ...]] = set()
  lines = []
  for key, bound in all_bindings().items():
    name = key[1].split(".")[-1]
    if name in RUNS:
      seen.add(key)
      lines += [f"{name}.{given} = {_code(bound[given], [], seen)}" for given in sorted(bound)]
  if not lines and _has_model():
    lines = [f"MODEL = {_code(gin.query_parameter('MODEL/gin.macro.value'), ['MODEL'], seen)}"]
  rest = sorted(key for key in all_bindings() if key not in seen and key[1] != "gin.macro")
  for scope, selector in rest:
    call = _call_code(selector, all_bindings()[scope, selector], [], seen)
    lines.append(f"also {scope}{'/' * bool(scope)}{call}")
  return lines


def _code(value: Any, scopes: list[str], seen: set[tuple[str, ...]]) -> str:
  """Returns a gin value as Python code, with all that it refers to."""
  match value:
    case ConfigurableReference():
      return _reference_code(value, scopes, seen)
    case dict():
      return f"{{{', '.join(f'{k!r}: {_code(v, scopes, seen)}' for k, v in value.items())}}}"
    case list() | tuple():
      return f"[{', '.join(_code(item, scopes, seen) for item in value)}]"
    case _:
      return repr(value)


def _reference_code(
  value: ConfigurableReference, scopes: list[str], seen: set[tuple[str, ...]]
) -> str:
  selector = value.configurable.selector
  if selector == "gin.macro":
    name = value.scopes[0]
    return _code(all_bindings()[name, "gin.macro"]["value"], [name], seen)
  inner = value.scopes or scopes
  bound = bound_arguments(value.configurable, inner)
  if bound and (selector, *inner) in seen:  # its arguments are in the text already
    return f"{selector.rsplit('.', 1)[-1]}(…)"
  seen.update({(selector, *inner)} | {(scope, selector) for scope in ("", *inner)})
  return _call_code(selector, bound, inner, seen, value.evaluate)


def _call_code(
  selector: str, bound: Mapping[str, Any], scopes: list[str], seen: Any, evaluate: bool = True
) -> str:
  name = selector.rsplit(".", 1)[-1]
  arguments = ", ".join(f"{n}={_code(bound[n], scopes, seen)}" for n in sorted(bound))
  return f"{name}({arguments})" if evaluate or arguments else name


def _schedule_text() -> str:
  """Returns the learning rates that the trainer logs at a few steps."""
  trainer = all_bindings().get(("", "t5x.trainer.Trainer"), {})
  if "learning_rate_fn" not in trainer:
    return "none"
  schedule = trainer["learning_rate_fn"].scoped_configurable_fn()
  return ", ".join(f"{step}: {float(schedule(step)):.5g}" for step in SCHEDULE_STEPS)


def _parameters_text() -> str:
  if not _has_model():
    return "none"
  shapes = shapes_of(bound_model())
  listing = "\n".join(f"{name} {shape}" for name, shape in sorted(shapes.items()))
  digest = hashlib.sha256(listing.encode()).hexdigest()[:8]
  count = sum(math.prod(shape) for shape in shapes.values())
  return f"{count:,} in {len(shapes)} arrays, shapes {digest}"


def _has_model() -> bool:
  """Returns whether MODEL is bound."""
  return ("MODEL", "gin.macro") in all_bindings()


def bound_model() -> Any:
  """Returns the model to which MODEL is bound."""
  return gin.query_parameter("MODEL/gin.macro.value").scoped_configurable_fn()


def shapes_of(model: Any, in_full: bool = False) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of a model's parameters by name.

  Tracing 48 layers takes seconds. Unless `in_full` is set, only the first layer of each stack is
  traced, or the first period of layers with and without experts, and repeated for the others.
  """
  config = model.module.config
  is_scanned = getattr(config, "scan_layers", False)
  fields = (f.name for f in dataclasses.fields(config))
  depths = {n: getattr(config, n) for n in fields if n.startswith("num_") and n.endswith("layers")}
  if in_full:
    return _trace_shapes(type(model), type(model.module), config)
  # These settings have no parameters. Without them, more configs are equal, and tracing takes less time.
  plain = {"dropout_rate": 0.0, "remat_policy": "none", "dtype": "float32"}
  config = dataclasses.replace(config, **{n: x for n, x in plain.items() if hasattr(config, n)})
  if is_scanned:
    return _trace_shapes(type(model), type(model.module), config)
  period = config.expert_layer_period if config.num_experts else 1
  shallow = dataclasses.replace(config, **{name: min(n, period) for name, n in depths.items()})
  shapes = _trace_shapes(type(model), type(model.module), shallow)
  return dict(_with_all_layers(shapes, depths, period))


def _trace_shapes(model_cls: Any, module_cls: Any, config: Any) -> dict[str, tuple[int, ...]]:
  key = (model_cls, module_cls, repr(config))
  if key not in _traced:
    _traced[key] = _trace(model_cls, module_cls, config)
  return _traced[key]


def _trace(model_cls: Any, module_cls: Any, config: Any) -> dict[str, tuple[int, ...]]:
  # The shapes do not depend on the vocabularies, whose files may be in a remote bucket.
  vocabularies = {n: None for n in inspect.signature(model_cls).parameters if "vocabulary" in n}
  model = model_cls(module=module_cls(config), optimizer_def=None, **vocabularies)
  tokens = {"encoder_input_tokens": (1, 16), "decoder_input_tokens": (1, 8)}
  if not hasattr(config, "num_encoder_layers"):
    del tokens["encoder_input_tokens"]
  key = jax.random.PRNGKey(0)
  variables = jax.eval_shape(lambda rng: model.get_initial_variables(rng, tokens), key)
  leaves = jax.tree_util.tree_leaves_with_path(variables["params"])
  return {jax.tree_util.keystr(path, simple=True, separator="/"): x.shape for path, x in leaves}


def _with_all_layers(
  shapes: Mapping[str, Any], depths: Mapping[str, int], period: int
) -> Iterator[tuple[str, Any]]:
  for name, shape in shapes.items():
    yield name, shape
    if layer := re.fullmatch(r"(.*)/layers_(\d+)/(.*)", name):
      stack, number, rest = layer[1], int(layer[2]), layer[3]
      depth = depths.get(f"num_{stack}_layers", depths.get("num_layers", 0))
      for i in range(number + period, depth, period):
        yield f"{stack}/layers_{i}/{rest}", shape


if __name__ == "__main__":
  write_golden()
