"""Configures jax for the suite: eight CPU devices, strict ranks, a compilation cache of its own."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import pathlib
import signal
import sys
from collections.abc import Iterator

import forked_python
import jax
import jaxtyping
import pytest
from jax._src.interpreters import mlir

# The suite has a compilation cache of its own, so that it neither reads nor fills the user's. The
# processes that tests start inherit the variables; jax is imported already, so it is configured too.
# Programs that compile in less than 0.05 s take a quarter of the time of compilation, and are not worth writing.
# The next run reads the others.
_COMPILATION_CACHE = {
  "jax_compilation_cache_dir": str(
    pathlib.Path(__file__).resolve().parents[1] / ".pytest_cache" / "compilation_cache"
  ),
  "jax_persistent_cache_min_compile_time_secs": 0.05,
}
for _name, _value in _COMPILATION_CACHE.items():
  os.environ[_name.upper()] = str(_value)
  jax.config.update(_name, _value)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# A shell that starts the suite in the background lets it ignore Ctrl-C, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tracing allocates so many objects that garbage collection with Python's default threshold of 700 takes
# 9% of the suite's time.
gc.set_threshold(50_000)

# jax makes an MLIR context for each program that it compiles, which takes 6% of the suite's time; here, the
# programs of a test file share one. If a version of jax lacks this private function, delete the line and the
# fixture `new_mlir_context`: the tests do not depend on them.
mlir.make_ir_context = functools.cache(mlir.make_ir_context)

# On several CPU devices, jaxlib 0.11's default order of operations can deadlock.
if jax.__version_info__ >= (0, 11):
  os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_enable_concurrency_optimized_scheduler=false"
  )

_TESTS = pathlib.Path(__file__).parent
# The tests whose calls check annotated shapes: those of the packages that have them (pyproject.toml). For
# whole runs, the checks would take a sixth of the time of tracing.
_SHAPES_ARE_CHECKED = {"decoding", "kernels", "models", "networks", "training"}

_SHARED = pathlib.Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
  """Returns the folder of reference numbers and real data beside the checkout; skips if absent."""
  if not _SHARED.is_dir():
    pytest.skip("no folder ../shared with T5X's reference numbers beside this checkout")
  return _SHARED


@pytest.fixture(autouse=True)
def default_random_numbers() -> Iterator[None]:
  """Restores jax's random number generator, which runs without a seed replace by a faster one."""
  yield
  jax.config.update("jax_default_prng_impl", "threefry2x32")


@pytest.fixture(autouse=True, scope="module")
def shape_checks(request: pytest.FixtureRequest) -> None:
  """Checks annotated shapes at every call in the tests of the packages that have them."""
  folder = request.path.relative_to(_TESTS).parts[0]
  jaxtyping.config.update("jaxtyping_disable", folder not in _SHAPES_ARE_CHECKED)


@pytest.fixture(autouse=True, scope="module")
def new_mlir_context() -> None:
  """Starts each file with an MLIR context of its own, because a context keeps what programs put into it."""
  mlir.make_ir_context.cache_clear()


@pytest.fixture(autouse=True, scope="module")
def empty_gin_config() -> None:
  """Removes what earlier files have left in gin: bindings, and the lock, which refuses registrations.

  Methods of which they have set arguments are unregistered: gin then refuses subclasses.
  """
  if "gin" in sys.modules:
    import gin

    from rosetta_t5.config.language import gin_internals

    gin.clear_config()
    for configurable in gin_internals.registered_configurables():
      if configurable.is_method:
        gin_internals.unregister(configurable.wrapped)


@pytest.fixture
def isolated_registries() -> Iterator[None]:
  """Restores SeqIO's registries after the test."""
  from rosetta_t5.data.tensorflow_import import import_seqio

  seqio = import_seqio()
  registries = (seqio.TaskRegistry, seqio.MixtureRegistry)
  before = [{name: r.get(name) for name in r.names()} for r in registries]
  yield
  for registry, providers in zip(registries, before, strict=True):
    for name in list(registry.names()):
      if registry.get(name) is not providers.get(name):
        registry.remove(name)
    for name in providers.keys() - registry.names():
      registry.add_provider(name, providers[name])


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out the slow tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Skips the tests marked `gpu` on machines without one, and marks variants as slow."""
  have_quick_variant: set[str] = set()
  for item in items:
    function = item.nodeid.partition("[")[0]
    marks = {mark.name for mark in item.iter_markers()}
    if "one_quick_variant" in marks and not marks & {"slow", "gpu"}:
      if function in have_quick_variant:
        item.add_marker(pytest.mark.slow)
      have_quick_variant.add(function)
  marked = [item for item in items if item.get_closest_marker("gpu")]
  if marked and jax.default_backend() != "gpu":
    for item in marked:
      item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_configure(config: pytest.Config) -> None:
  """Serves the stand-in for Python while the tests run, in one place for all of xdist's processes."""
  if not hasattr(config, "workerinput"):
    stack = contextlib.ExitStack()
    config.add_cleanup(stack.close)
    os.environ[forked_python.VARIABLE] = stack.enter_context(forked_python.serving())
  else:
    # Without this, one of xdist's processes spends 5 s on deleting jax's compiled programs at its exit. It is
    # registered after jax's own function, so it is called first.
    atexit.register(os._exit, 0)


def pytest_sessionfinish() -> None:
  """Leaves garbage where it is: pytest would collect it five times, and an iterator of tf.data over a Python
  generator waits forever for its thread if it is deleted by a collection.
  """
  gc.freeze()
