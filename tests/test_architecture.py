"""The rules of docs/architecture.md that a machine can check, one test for each rule."""

from __future__ import annotations

import ast
import functools
import graphlib
import pathlib
import subprocess
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "rosetta_t5").rglob("*.py"))

# From top to bottom: a file imports from its own package and from packages further down.
PACKAGES = (
  "cli",
  "run_report",
  "serving",
  "train",
  "train_loop",
  "eval",
  "infer",
  "interactive",
  "export",
  "precompile",
  "gpu_program",
  "trained_model",
  "conversion",
  "out_of_memory",
  "plan",
  "config",
  "inference",
  "checkpoints",
  "data",
  "models",
  "adapters",
  "training",
  "decoding",
  "networks",
  "kernels",
  "traced",
  "parallel",
  "distributed",
  "telemetry",
  "files",
  "user_errors",
  "terminal",
  "argument_types",
  "jax_internals",
)
# Each third-party package that only some packages may import.
RESTRICTED = {
  "gin": {"config"},
  "seqio": {"data"},
  "t5": {"data"},
  "tensorflow": {"data"},
  "tensorflow_datasets": {"data"},
  "tensorflow_text": {"data"},
}
# Exceptions to RESTRICTED, inside functions, with the reason.
EXCEPTIONS = {
  "rosetta_t5/models/base_model.py": {"seqio"},  # the feature converter, once data is read
  "rosetta_t5/telemetry/metrics_manager.py": {"tensorflow"},  # hides GPUs from clu's writer
}
# These take seconds to import, so they are imported inside functions.
SLOW_TO_IMPORT = {
  "seqio",
  "t5",
  "tensorflow",
  "tensorflow_datasets",
  "tensorflow_text",
  "clu.metric_writers",
}
# Modules that are imported only when a gin file names them.
LOADED_LATE = {"rosetta_t5/data/tasks/stdlib_docs.py"}


def _name(path: pathlib.Path) -> str:
  return str(path.relative_to(ROOT))


def _module(path: pathlib.Path) -> str:
  return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def _tree(path: pathlib.Path) -> ast.Module:
  return ast.parse(path.read_text(encoding="utf-8"))


def _modules_of(statement: ast.AST) -> list[str]:
  """The modules that an import statement names; `from a import b` gives a and a.b."""
  if isinstance(statement, ast.Import):
    return [alias.name for alias in statement.names]
  if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
    return [statement.module, *(f"{statement.module}.{alias.name}" for alias in statement.names)]
  return []


def _is_type_checking(node: ast.AST) -> bool:
  return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _imports(path: pathlib.Path) -> set[str]:
  """The modules that a file imports anywhere, except for type checkers only."""
  runtime = [node for node in _tree(path).body if not _is_type_checking(node)]
  return {module for top in runtime for node in ast.walk(top) for module in _modules_of(node)}


def _imports_at_load(body: list[ast.stmt]) -> Iterator[str]:
  """The modules that a file imports when it is itself imported, outside functions."""
  for node in body:
    if not (isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or _is_type_checking(node)):
      yield from _modules_of(node)
      for block in ("body", "orelse", "finalbody"):
        yield from _imports_at_load(getattr(node, block, []))


def _package(module: str) -> str | None:
  """The package of this project that a module belongs to: `rosetta_t5.data.feed` gives `data`."""
  first, _, rest = module.partition(".")
  return rest.split(".")[0] if first == "rosetta_t5" and rest else None


def test_files_import_only_from_their_own_package_and_from_packages_below():
  wrong = []
  for path in SOURCES:
    own = _package(_module(path))
    if own is None:
      continue
    assert own in PACKAGES, f"add {own!r} to PACKAGES and to docs/architecture.md"
    above = set(PACKAGES[: PACKAGES.index(own)])
    # Type-only imports count too: they would be cycles for a reader.
    imported = {m for node in ast.walk(_tree(path)) for m in _modules_of(node)}
    wrong += [f"{_name(path)} imports {m}" for m in sorted(imported) if _package(m) in above]
  assert not wrong


def test_gin_is_imported_only_in_config_and_tensorflow_only_in_data():
  wrong = []
  for path in SOURCES:
    packages = {module.split(".")[0] for module in _imports(path)} & set(RESTRICTED)
    packages -= EXCEPTIONS.get(_name(path), set())
    own = _package(_module(path))
    wrong += [f"{_name(path)} imports {p}" for p in sorted(packages) if own not in RESTRICTED[p]]
  assert not wrong


def test_data_imports_tensorflow_and_seqio_through_one_module():
  through = "tensorflow_import.py"
  files = [p for p in SOURCES if "data" in p.relative_to(ROOT).parts and p.name != through]
  assert len(files) > 20
  assert not [_name(p) for p in files if {"tensorflow", "seqio"} & _imports(p)]


def test_packages_that_load_slowly_are_imported_inside_functions():
  wrong = []
  for path in SOURCES:
    if _name(path) in LOADED_LATE:
      continue
    at_load = set(_imports_at_load(_tree(path).body))
    slow = sorted(m for m in at_load if m in SLOW_TO_IMPORT or m.split(".")[0] in SLOW_TO_IMPORT)
    wrong += [f"{_name(path)} imports {m}" for m in slow]
  assert not wrong


def test_there_are_no_import_cycles():
  modules = {_module(path): path for path in SOURCES}
  graph = {}
  for name, path in modules.items():
    needed = {m for m in _imports_at_load(_tree(path).body) if m in modules and m != name}
    # `from a import b` of a module b needs a.b to be loaded, but a only to be begun.
    graph[name] = {m for m in needed if not any(other.startswith(m + ".") for other in needed)}
  graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which shows the cycle


def test_rosetta_t5_does_not_import_t5x():
  assert not [_name(p) for p in SOURCES if any(m.split(".")[0] == "t5x" for m in _imports(p))]


def test_the_mesh_in_use_and_the_axis_rules_are_read_and_set_in_one_module():
  ambient = {"get_abstract_mesh", "use_abstract_mesh", "set_mesh", "get_axis_rules", "axis_rules"}
  users = {
    _name(path)
    for path in SOURCES
    for node in ast.walk(_tree(path))
    if isinstance(node, ast.Attribute) and node.attr in ambient
  }
  assert users == {"rosetta_t5/parallel/placement.py"}


def test_no_module_has_a_vague_name():
  vague = {"utils", "util", "helpers", "helper", "common", "misc"}
  assert not [_name(path) for path in SOURCES if path.stem in vague or path.parent.name in vague]


def test_no_file_is_longer_than_400_lines():
  files = [*SOURCES, *(ROOT / "t5x").rglob("*.py")]
  long = {_name(p): n for p in files if (n := len(p.read_text().splitlines())) > 400}
  assert not long


def test_a_package_has_at_most_14_modules_at_its_top_level():
  folders = {path.parent for path in SOURCES}
  crowded = {_name(f): n for f in folders if (n := len(list(f.glob("[!_]*.py")))) > 14}
  assert not crowded


def test_training_models_and_data_load_fast_without_tensorflow_seqio_and_gin():
  program = (
    "import sys, time; start = time.process_time()\n"
    "import rosetta_t5.training, rosetta_t5.models, rosetta_t5.data\n"
    "print(time.process_time() - start, *sys.modules)"
  )
  out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
  seconds, *modules = out.stdout.split()
  assert not {"tensorflow", "seqio", "gin", "t5", "keras", "tensorflow_datasets"} & set(modules)
  # It takes about 2 s; the machine that runs the tests may be busy or slow.
  assert float(seconds) < 6
