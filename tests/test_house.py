"""The rules of the house that a machine can check; docs/architecture.md says why they are."""

from __future__ import annotations

import ast
import functools
import graphlib
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
# From the top of the house down: a file imports from its own room and from rooms after it.
ROOMS = (
  "cli",
  "compat",
  "quickstart",
  "doctor",
  "bench",
  "main",
  "train",
  "eval",
  "infer",
  "interactive",
  "export",
  "precompile",
  "text_commands",
  "trained_model",
  "conversion",
  "memory_advice",
  "plan",
  "config",
  "inference",
  "checkpoints",
  "data",
  "models",
  "training",
  "decoding",
  "networks",
  "kernels",
  "parallel",
  "distributed",
  "telemetry",
)
# Each package and the rooms that may name it. In data, seqio and TensorFlow stay inside functions.
KEPT_IN = {
  "gin": ("config",),
  "seqio": ("data",),
  "t5": ("data",),
  "tensorflow": ("data",),
  "tensorflow_datasets": ("data",),
  "tensorflow_text": ("data",),
}
# Where they are needed all the same, inside a function, and why.
GUESTS = {
  "rosetta_t5/models/base.py": {"seqio"},  # the feature converter, once data is read
  "rosetta_t5/telemetry/metrics_manager.py": {"tensorflow"},  # hides GPUs from clu's writer
}
HEAVY = {
  "seqio",
  "t5",
  "tensorflow",
  "tensorflow_datasets",
  "tensorflow_text",
  "clu.metric_writers",
}
SOURCES = sorted((ROOT / "rosetta_t5").rglob("*.py"))
DOORS = sorted(path for path in (ROOT / "t5x").rglob("*.py") if path.name != "__init__.py")


def _name(path: pathlib.Path) -> str:
  return str(path.relative_to(ROOT))


@functools.cache
def _tree(path: pathlib.Path) -> ast.Module:
  return ast.parse(path.read_text(encoding="utf-8"))


def _imported(node: ast.AST) -> list[str]:
  """The modules that an import statement names; `from a import b` gives a and a.b."""
  if isinstance(node, ast.Import):
    return [alias.name for alias in node.names]
  if isinstance(node, ast.ImportFrom) and node.module and not node.level:
    return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
  return []


def _imports(tree: ast.Module) -> Iterator[str]:
  """What a file imports anywhere."""
  for node in ast.walk(tree):
    yield from _imported(node)


def _imports_at_once(body: list[ast.stmt]) -> Iterator[str]:
  """What a file imports when it is imported: not in functions, not for type checkers only."""
  for node in body:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
      continue
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
      continue
    yield from _imported(node)
    for inner in ("body", "orelse", "finalbody"):
      yield from _imports_at_once(getattr(node, inner, []))


def _room(module: str) -> str | None:
  first, _, rest = module.partition(".")
  return rest.split(".")[0] if first == "rosetta_t5" and rest else None


def _own_room(path: pathlib.Path) -> str | None:
  return _room(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_files_import_from_their_own_room_and_from_those_below(path):
  own = _own_room(path)
  if own is None:
    return
  assert own in ROOMS, f"{own} is no room: add it to ROOMS and to docs/architecture.md"
  above = set(ROOMS[: ROOMS.index(own)])
  wrong = sorted({m for m in _imports(_tree(path)) if _room(m) in above})
  assert not wrong, f"{_name(path)} ({own}) imports from rooms above it: {wrong}"


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_gin_and_tensorflow_stay_in_their_rooms(path):
  packages = {module.split(".")[0] for module in _imports(_tree(path))}
  wrong = {p for p in packages & set(KEPT_IN) if _own_room(path) not in KEPT_IN[p]}
  wrong -= GUESTS.get(_name(path), set())
  # What only a type checker reads may be named anywhere.
  if wrong:
    wrong &= {module.split(".")[0] for module in _imports_when_run(_tree(path))}
  assert not wrong, f"{_name(path)} imports {sorted(wrong)}; that is for {KEPT_IN}"


def _imports_when_run(tree: ast.Module) -> Iterator[str]:
  for node in ast.iter_child_nodes(tree):
    if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
      for inner in ast.walk(node):
        yield from _imported(inner)


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_heavy_packages_are_imported_inside_functions(path):
  if path.parent == ROOT / "rosetta_t5/data/tasks":
    return  # imported late, by the module that a gin file names
  at_once = set(_imports_at_once(_tree(path).body))
  wrong = {m for m in at_once if m in HEAVY or m.split(".")[0] in HEAVY}
  assert not wrong, f"{_name(path)} imports {sorted(wrong)} before it is needed"


def test_no_file_imports_itself_by_a_detour():
  modules = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in SOURCES}
  names = {name.removesuffix(".__init__"): path for name, path in modules.items()}
  graph = {}
  for name, path in names.items():
    needs = {m for m in _imports_at_once(_tree(path).body) if m in names and m != name}
    # `from a import b` of a module b needs a.b, and of a only that it has begun.
    graph[name] = {m for m in needs if not any(other.startswith(m + ".") for other in needs)}
  graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the cycle


@pytest.mark.parametrize("path", DOORS, ids=_name)
def test_doors_re_export_and_do_nothing(path):
  docstring, *body = _tree(path).body
  assert isinstance(docstring, ast.Expr), "a door says in one line what it leads to"
  if isinstance(body[-1], ast.If):
    condition, call = ast.unparse(body.pop()).split("\n    ")
    assert condition == "if __name__ == '__main__':"
    assert call in ("main()", "raise SystemExit(main())")
  assert all(isinstance(i, ast.ImportFrom) and _room(f"{i.module}") for i in body), _name(path)


def test_files_are_named_by_what_they_hold():
  vague = {"utils", "util", "helpers", "helper", "common", "misc"}
  assert not [_name(path) for path in SOURCES if path.stem in vague or path.parent.name in vague]


def test_no_file_is_long():
  long = {_name(p): n for p in SOURCES if (n := len(p.read_text().splitlines())) > 400}
  assert not long, "split these, or say in docs/architecture.md why not"


def test_training_and_models_import_fast_without_tensorflow_seqio_and_gin():
  program = (
    "import sys, time; start = time.process_time()\n"
    "import rosetta_t5.training, rosetta_t5.models\n"
    "print(time.process_time() - start, *sys.modules)"
  )
  out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
  seconds, *modules = out.stdout.split()
  assert not {"tensorflow", "seqio", "gin", "t5", "keras", "tensorflow_datasets"} & set(modules)
  # 3 s are promised; the machine that runs the tests may be busy or slow.
  assert float(seconds) < 6
