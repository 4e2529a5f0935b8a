"""What each recipe comes to, as a short text: what gin resolved, the model's shapes, the schedule.

`python tests/golden_recipes.py` (or `make golden`) writes the texts of all recipes anew.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import gin
import jax
from gin.config import ConfigurableReference

from rosetta_t5.config.checks.completeness import EXAMPLES
from rosetta_t5.config.language.binding import bind
from rosetta_t5.config.language.gin_internals import all_bindings
from rosetta_t5.config.language.names import bound_arguments
from rosetta_t5.config.language.statements import Macro, read_program
from rosetta_t5.config.t5x.paths import RECIPES
from rosetta_t5.data.tensorflow_setup.tensorflow_import import import_seqio

GOLDEN = pathlib.Path(__file__).parent / "golden"
# Values for what recipes leave open, besides those that error texts show.
GIVEN = {
  "FEATURE_LENGTHS": "{'inputs': 512, 'targets': 128}",
  "MODEL_NAME": "'/ml/name'",
  "MODEL_OUTPUT_DIR": "'/path/for/results'",
  "TF_EXAMPLE_FILE_PATHS": "['/path/to/examples.tfrecord']",
  "TF_EXAMPLE_FILE_TYPE": "'tfrecord'",
  "TRAIN_EVAL_MIXTURE_OR_TASK_NAME": "'name_of_a_seqio_task'",
} | EXAMPLES
# What goes before a recipe that is no run or model of its own.
BEFORE = {
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
}
RUNS = ("train", "evaluate", "infer", "precompile", "save")
SCHEDULE_AT = (0, 1_000, 10_000, 100_000, 1_010_000)


def every_recipe() -> list[str]:
  """models/t5_1_1/small and the like."""
  return sorted(str(file.relative_to(RECIPES).with_suffix("")) for file in RECIPES.rglob("*.gin"))


def text(name: str) -> str:
  """The golden text of a recipe.

  A fragment's text is what it changes in the recipe before it; an example's what it changes in its
  run with T5 1.1 base. Parameters and schedule are always told.
  """
  before, without = (), ()
  if name in BEFORE:
    before = without = (BEFORE[name],)
  elif name.startswith("runs/"):
    before = ("models/t5_1_1/base",)
  elif name.startswith("examples/"):
    without = ("models/t5_1_1/base", _run_of(name))
  known = set(_lines(*without)) if without else set()
  *lines, parameters, schedule = _lines(*before, name)
  changed = [line for line in lines if line not in known]
  told = [f"as {' with '.join(without)}"] if without else []
  return "\n".join([name, *(f"  {line}" for line in (*told, *changed, parameters, schedule))])


def read_golden(file: pathlib.Path) -> dict[str, str]:
  """The golden texts of a file by recipe."""
  texts = file.read_text(encoding="utf-8").strip().split("\n\n")
  return {golden.splitlines()[0]: golden for golden in texts}


def write_golden() -> None:
  """Writes the texts of all recipes, a file for each of gin's folders."""
  for kind in ("models", "runs", "examples"):
    texts = [text(name) for name in every_recipe() if name.startswith(f"{kind}/")]
    (GOLDEN / f"{kind}.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")


def _run_of(name: str) -> str:
  """The run that an example includes last."""
  bindings = read_program([str(RECIPES / f"{name}.gin")]).all_bindings()
  files = [b.source.file for b in bindings]
  return [f for f in files if f.startswith("gin/runs/")][-1].removeprefix("gin/")[: -len(".gin")]


@functools.cache
def _lines(*names: str) -> tuple[str, ...]:
  resolve(*names)
  return (*_bound(), f"parameters: {_parameters()}", f"schedule: {_schedule()}")


def resolve(*names: str) -> None:
  """Binds recipes, later ones winning, with a value for everything that they leave open."""
  import_seqio()  # quietly, and before a recipe does
  gin.clear_config()
  files = [str(RECIPES / f"{name}.gin") for name in names]
  effective = read_program(files).effective_bindings().values()
  left_open = [b.name for b in effective if b.value == Macro("gin.REQUIRED")]
  program = read_program(files, [f"{name} = {GIVEN[name]}" for name in left_open])
  bind(program).raise_if_any()


def _bound() -> list[str]:
  """The run's arguments, all that they refer to, then what is bound besides."""
  seen: set[tuple[str, ...]] = set()
  lines = []
  for key, bound in all_bindings().items():
    name = key[1].split(".")[-1]
    if name in RUNS:
      seen.add(key)
      lines += [f"{name}.{given} = {_text(bound[given], [], seen)}" for given in sorted(bound)]
  if not lines and has_model():
    lines = [f"MODEL = {_text(gin.query_parameter('MODEL/gin.macro.value'), ['MODEL'], seen)}"]
  rest = sorted(key for key in all_bindings() if key not in seen and key[1] != "gin.macro")
  for scope, selector in rest:
    call = _call(selector, all_bindings()[scope, selector], [], seen)
    lines.append(f"also {scope}{'/' * bool(scope)}{call}")
  return lines


def _text(value: Any, scopes: list[str], seen: set[tuple[str, ...]]) -> str:
  """A gin value, with all that it refers to, as Python would write it."""
  match value:
    case ConfigurableReference():
      return _reference(value, scopes, seen)
    case dict():
      return f"{{{', '.join(f'{k!r}: {_text(v, scopes, seen)}' for k, v in value.items())}}}"
    case list() | tuple():
      return f"[{', '.join(_text(item, scopes, seen) for item in value)}]"
    case _:
      return repr(value)


def _reference(value: ConfigurableReference, scopes: list[str], seen: set[tuple[str, ...]]) -> str:
  selector = value.configurable.selector
  if selector == "gin.macro":
    name = value.scopes[0]
    return _text(all_bindings()[name, "gin.macro"]["value"], [name], seen)
  inner = value.scopes or scopes
  bound = bound_arguments(value.configurable, inner)
  if bound and (selector, *inner) in seen:  # told once is enough
    return f"{selector.rsplit('.', 1)[-1]}(…)"
  seen.update({(selector, *inner)} | {(scope, selector) for scope in ("", *inner)})
  return _call(selector, bound, inner, seen, value.evaluate)


def _call(
  selector: str, bound: Mapping[str, Any], scopes: list[str], seen: Any, evaluate: bool = True
) -> str:
  name = selector.rsplit(".", 1)[-1]
  arguments = ", ".join(f"{n}={_text(bound[n], scopes, seen)}" for n in sorted(bound))
  return f"{name}({arguments})" if evaluate or arguments else name


def _schedule() -> str:
  """The learning rates that the trainer logs, at a few steps."""
  trainer = all_bindings().get(("", "t5x.trainer.Trainer"), {})
  if "learning_rate_fn" not in trainer:
    return "none"
  schedule = trainer["learning_rate_fn"].scoped_configurable_fn()
  return ", ".join(f"{step}: {float(schedule(step)):.5g}" for step in SCHEDULE_AT)


def _parameters() -> str:
  if not has_model():
    return "none"
  shapes = shapes_of(bound_model())
  listing = "\n".join(f"{name} {shape}" for name, shape in sorted(shapes.items()))
  digest = hashlib.sha256(listing.encode()).hexdigest()[:8]
  count = sum(math.prod(shape) for shape in shapes.values())
  return f"{count:,} in {len(shapes)} arrays, shapes {digest}"


def has_model() -> bool:
  """Whether MODEL is bound."""
  return ("MODEL", "gin.macro") in all_bindings()


def bound_model() -> Any:
  """The model that MODEL is bound to."""
  return gin.query_parameter("MODEL/gin.macro.value").scoped_configurable_fn()


def shapes_of(model: Any, in_full: bool = False) -> dict[str, tuple[int, ...]]:
  """The shapes of a model's parameters by name.

  Tracing 48 layers takes seconds. Unless `in_full`, the first layer of each stack is traced, and
  stands for all that follow.
  """
  config = dataclasses.replace(model.module.config, dropout_rate=0.0)  # it makes no parameters
  is_scanned = getattr(config, "scan_layers", False)
  fields = (f.name for f in dataclasses.fields(config))
  depths = {n: getattr(config, n) for n in fields if n.startswith("num_") and n.endswith("layers")}
  if in_full or is_scanned:
    return _traced(type(model), type(model.module), config)
  one = dataclasses.replace(config, **{name: min(depth, 1) for name, depth in depths.items()})
  return dict(_grown(_traced(type(model), type(model.module), one), depths))


@functools.cache
def _traced(model_cls: Any, module_cls: Any, config: Any) -> dict[str, tuple[int, ...]]:
  # A vocabulary that no bucket has to be asked for.
  vocabularies = {n: None for n in inspect.signature(model_cls).parameters if "vocabulary" in n}
  model = model_cls(module=module_cls(config), optimizer_def=None, **vocabularies)
  tokens = {"encoder_input_tokens": (1, 16), "decoder_input_tokens": (1, 8)}
  if not hasattr(config, "num_encoder_layers"):
    del tokens["encoder_input_tokens"]
  key = jax.random.PRNGKey(0)
  variables = jax.eval_shape(lambda rng: model.get_initial_variables(rng, tokens), key)
  leaves = jax.tree_util.tree_leaves_with_path(variables["params"])
  return {jax.tree_util.keystr(path, simple=True, separator="/"): x.shape for path, x in leaves}


def _grown(shapes: Mapping[str, Any], depths: Mapping[str, int]) -> Iterator[tuple[str, Any]]:
  for name, shape in shapes.items():
    yield name, shape
    stack, first_layer, rest = name.partition("/layers_0/")
    if first_layer:
      depth = depths.get(f"num_{stack}_layers", depths.get("num_layers", 0))
      yield from ((f"{stack}/layers_{i}/{rest}", shape) for i in range(1, depth))


if __name__ == "__main__":
  write_golden()
