"""The initializer of train states, and its programs for each leaf."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec

from rosetta_t5.checkpoints import RestoreCheckpointConfig, TrainStateInitializer
from rosetta_t5.checkpoints.train_state_initializer import compile_leafwise
from rosetta_t5.parallel import PjitPartitioner

RNG = jax.random.PRNGKey(0)
KEY = jax.random.PRNGKey(3)


@pytest.fixture
def two_checkpoints(setup, tmp_path):
  manager = setup.manager(tmp_path)
  for step in (1, 2):
    manager.save(setup.state(step=step))
  manager.close()
  return tmp_path


def test_shapes_are_known_before_initialization(setup):
  shape = setup.initializer.global_train_state_shape
  assert isinstance(shape.params["wi"], jax.ShapeDtypeStruct)
  assert shape.params["wi"].shape == (8, 16)
  assert setup.initializer.train_state_axes.params["wi"] == PartitionSpec(None, "model")


def test_an_initialized_state_is_sharded_over_the_mesh(setup):
  state = setup.initializer.from_scratch(RNG)
  assert state.params["wi"].sharding.spec == PartitionSpec(None, "model")
  assert state.params["wi"].addressable_shards[0].data.shape == (8, 8)
  assert int(state.step) == 0


def test_same_key_gives_the_same_parameters_on_every_mesh(setup, make_setup):
  other = make_setup(num_partitions=8)
  np.testing.assert_array_equal(
    setup.initializer.from_scratch(RNG).params["wi"],
    other.initializer.from_scratch(RNG).params["wi"],
  )


def test_no_two_leaves_share_memory_so_the_state_can_be_donated(setup):
  state = setup.initializer.from_scratch(RNG)
  leaves = jax.tree.leaves(state)
  buffers = {s.data.unsafe_buffer_pointer() for leaf in leaves for s in leaf.addressable_shards}
  assert len(buffers) == sum(len(leaf.addressable_shards) for leaf in leaves)
  step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
  assert int(step(step(state)).step) == 2


def test_init_function_gets_shapes_and_types(setup):
  seen = []

  def init(rng, input_shapes, input_types):
    seen.append((input_shapes, input_types))
    return setup.init_variables(rng, input_shapes, input_types)

  types = {"x": np.float32}
  TrainStateInitializer(setup.optimizer, init, {"x": (4, 8)}, setup.partitioner, types)
  assert seen == [({"x": (4, 8)}, types)]


def test_several_checkpoints_are_restored_in_order(setup, two_checkpoints):
  cfg = RestoreCheckpointConfig(path=str(two_checkpoints), mode="all")
  found = list(setup.initializer.from_checkpoints([cfg]))
  assert [int(state.step) for state, _ in found] == [1, 2]
  assert [path for _, path in found] == [f"{two_checkpoints}/checkpoint_{step}" for step in (1, 2)]


def test_from_checkpoint_restores_exactly_one_checkpoint(setup, two_checkpoints):
  latest = RestoreCheckpointConfig(path=str(two_checkpoints))
  assert int(setup.initializer.from_checkpoint([latest]).step) == 2
  every = RestoreCheckpointConfig(path=str(two_checkpoints), mode="all")
  with pytest.raises(ValueError, match=r"got 2: .*\. Set one path, and RestoreCheck"):
    setup.initializer.from_checkpoint([every])


def test_a_state_is_initialized_if_no_config_names_a_checkpoint(setup, two_checkpoints, tmp_path):
  latest = RestoreCheckpointConfig(path=str(two_checkpoints))
  absent = RestoreCheckpointConfig(path=str(tmp_path / "absent"))
  from_either = setup.initializer.from_checkpoint_or_scratch
  assert int(from_either([absent, latest], init_rng=RNG).step) == 2
  assert int(from_either([absent], init_rng=RNG).step) == 0
  assert setup.initializer.from_checkpoint([absent]) is None


def test_parameters_have_the_methods_of_t5xs_frozen_dicts_and_may_be_replaced_by_plain_dicts(setup):
  state = setup.initializer.from_scratch(RNG)
  plain = state.params.unfreeze()
  assert type(plain) is dict
  assert state.params.copy({"more": 1})["more"] == 1
  replaced = [state.replace_params(plain)]
  replaced.append(state.replace(_optimizer=state._optimizer.replace(target=plain)))
  for each in replaced:
    assert jax.tree.structure(each) == jax.tree.structure(state)


class CountingPartitioner(PjitPartitioner):
  """Counts the functions that it compiles."""

  def __init__(self):
    super().__init__(num_partitions=2)
    self.count = 0

  def partition(self, *args, **kwargs):
    self.count += 1
    return super().partition(*args, **kwargs)


class Stack(nn.Module):
  """Layers of equal shape and, with `uses_data`, a parameter that is initialized from the data."""

  depth: int = 6
  uses_data: bool = False

  @nn.compact
  def __call__(self, x):
    for number in range(self.depth):
      x = nn.Dense(8, name=f"layer_{number}")(x)
    if self.uses_data:
      self.param("mean", lambda key, values: jnp.mean(values, axis=0), x)
    return x


def run(fn, axes=None):
  partitioner = CountingPartitioner()
  traced, shapes = jax.make_jaxpr(fn, return_shape=True)(KEY)
  axes = jax.tree.map(lambda _: PartitionSpec(), shapes) if axes is None else axes
  return compile_leafwise(fn, traced, partitioner, axes)(KEY), partitioner


def assert_same(got, expected, rtol=0.0):
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol), got, expected)


def test_equal_initializers_are_compiled_once_and_draw_different_values():
  module = Stack()
  init = lambda key: module.init(key, jnp.ones((4, 8)))  # noqa: E731
  got, partitioner = run(init)
  assert_same(got, jax.jit(init)(KEY))
  assert partitioner.count == 2, "one program for six kernels, one for six biases"
  kernels = [layer["kernel"] for layer in got["params"].values()]
  assert len({np.asarray(kernel).tobytes() for kernel in kernels}) == 6


@pytest.mark.slow
def test_outputs_may_be_constants_keys_or_closed_over_arrays():
  table = jnp.arange(6.0).reshape(2, 3)

  def fn(key):
    a, b = jax.random.split(key)
    normal = jax.random.normal(a, (4,))
    return {
      "zero": jnp.zeros((), jnp.int32),
      "key": key,
      "table": table,
      "scaled": table * 2,
      "normal": normal,
      "normal_too": normal,
      "others": [jax.random.normal(b, (4,)), jax.random.uniform(a, (4,)), 3.0 * normal],
    }

  got, _ = run(fn)
  # A program of all outputs may round a value that several of them share differently.
  assert_same(got, jax.jit(fn)(KEY), rtol=1e-6)


def test_initializers_with_different_scales_are_compiled_separately():
  def fn(key):
    return [scale * jax.random.normal(key, (4,)) for scale in (1.5, 2.5, 1.5)]

  got, partitioner = run(fn)
  assert_same(got, jax.jit(fn)(KEY))
  assert partitioner.count == 2


@pytest.mark.slow
def test_an_initializer_may_depend_on_data():
  module = Stack(uses_data=True)
  init = lambda key: module.init(key, jnp.linspace(0.0, 1.0, 32).reshape(4, 8))  # noqa: E731
  got, _ = run(init)
  expected = jax.jit(init)(KEY)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)
  assert np.any(got["params"]["mean"])


def test_outputs_that_share_most_work_are_one_program():
  def fn(key):
    x = jax.random.normal(key, (8,))
    for _ in range(20):
      x = jnp.sin(x) + 1.0
    return [x * scale for scale in range(1, 9)]

  got, partitioner = run(fn)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, jax.jit(fn)(KEY))
  assert partitioner.count == 1


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("spec", [PartitionSpec("data"), PartitionSpec(None, "model")])
def test_leaves_have_the_given_sharding_and_values_independent_of_it(spec):
  fn = lambda key: jax.random.normal(key, (8, 4))  # noqa: E731
  got, _ = run(fn, spec)
  assert got.sharding.spec == spec
  np.testing.assert_array_equal(got, jax.jit(fn)(KEY))
