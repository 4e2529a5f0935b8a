"""The interface of all optimizers: init, jitted steps, checkpoint round trip, logical axes."""

from __future__ import annotations

import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util
from flax.core import freeze
from jax.sharding import PartitionSpec as P

from rosetta_t5.training.optimizers import optax_wrapper as optimizers
from rosetta_t5.training.optimizers.adafactor import Adafactor
from rosetta_t5.training.optimizers.composite import MultiOptimizer
from rosetta_t5.training.optimizers.optax_wrapper import OptaxWrapper
from rosetta_t5.training.optimizers.transformations import (
  all_except,
  average_parameters,
  muon,
  scale_by_name,
)
from rosetta_t5.training.schedules import create_learning_rate_scheduler

RNG = np.random.default_rng(0)
PARAMS = {
  "dense": {"kernel": jnp.asarray(RNG.normal(size=(16, 24)), jnp.float32), "bias": jnp.ones(24)},
  "norm": {"scale": jnp.full(16, 2.0)},
}
AXES = {
  "dense": {"kernel": P("embed", "mlp"), "bias": P("mlp")},
  "norm": {"scale": P("embed")},
}


def traversal(visits):
  # Traversals are deprecated in flax, but T5X's users have them in their gin files.
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    return traverse_util.ModelParamTraversal(lambda path, _: visits(path))


KERNELS = traversal(lambda path: "kernel" in path)
OTHERS = traversal(lambda path: "kernel" not in path)
IS_KERNEL = {"dense": {"kernel": True, "bias": False}, "norm": {"scale": False}}
GROUPS = {"dense": {"kernel": "a", "bias": "b"}, "norm": {"scale": "b"}}


def wrapped(transformation):
  return lambda: OptaxWrapper(transformation)


class Following(OptaxWrapper):
  """Optax's optimizers with the learning rate of a trainer."""

  def __init__(self, make):
    super().__init__(optimizers.chain([make]).optax_optimizer)
    self.hyper_params = self.hyper_params.replace(learning_rate=0.1)


def following(make):
  return lambda: Following(make)


OPTIMIZERS = {
  "adafactor": lambda: Adafactor(0.1, min_dim_size_to_factor=8),
  "adafactor momentum": lambda: Adafactor(0.1, beta1=0.9),
  "adafactor unfactored": lambda: Adafactor(0.1, factored=False),
  "multi": lambda: MultiOptimizer(
    [(KERNELS, Adafactor(0.1)), (OTHERS, Adafactor(0.01, beta1=0.9))]
  ),
  "multi with optax": lambda: MultiOptimizer(
    [(KERNELS, Adafactor(0.1)), (OTHERS, optimizers.adam(0.1))]
  ),
  "multi, a part": lambda: MultiOptimizer([(KERNELS, Adafactor(0.1))]),
  "adabelief": lambda: optimizers.adabelief(0.1),
  "adagrad": lambda: optimizers.adagrad(0.1),
  "adam": lambda: optimizers.adam(0.1),
  "adamw": lambda: optimizers.adamw(0.1, weight_decay=0.01),
  "fromage": lambda: optimizers.fromage(0.1),
  "lamb": lambda: optimizers.lamb(0.1),
  "lars": lambda: optimizers.lars(1.0),
  "lion": lambda: optimizers.lion(0.1),
  "noisy_sgd": lambda: optimizers.noisy_sgd(0.1, key=0),
  "radam": lambda: optimizers.radam(0.1),
  "rmsprop": lambda: optimizers.rmsprop(0.1),
  "sgd": lambda: optimizers.sgd(0.1),
  "sgd momentum": lambda: optimizers.sgd(0.1, momentum=0.9, nesterov=True),
  "yogi": lambda: optimizers.yogi(0.1),
  "chain": lambda: optimizers.chain([optax.clip_by_global_norm(1.0), optax.adamw(0.1)]),
  "chain with a schedule": lambda: optimizers.chain(
    [optax.adam(create_learning_rate_scheduler("constant * linear_warmup", 0.1, warmup_steps=4))]
  ),
  "optax adafactor": wrapped(optax.adafactor(0.1, min_dim_size_to_factor=8)),
  "ema": wrapped(optax.chain(optax.sgd(0.1), optax.ema(0.9))),
  "masked": wrapped(optax.chain(optax.masked(optax.adam(-0.1), IS_KERNEL), optax.scale(-0.5))),
  "multi_transform": wrapped(
    optax.multi_transform({"a": optax.adam(0.1), "b": optax.sgd(0.1, momentum=0.5)}, GROUPS)
  ),
  "multi_steps": wrapped(optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()),
  "inject_hyperparams": wrapped(optax.inject_hyperparams(optax.adamw)(learning_rate=0.1)),
  "apply_if_finite": wrapped(optax.apply_if_finite(optax.adam(0.1), 3)),
  "sm3": wrapped(optax.sm3(0.1)),
  "muon": following(muon),
  "ademamix": following(optax.contrib.ademamix),
  "schedule_free": following(optax.contrib.schedule_free_adamw),
  "prodigy": lambda: optimizers.chain([optax.contrib.prodigy(1.0, estim_lr0=0.1)]),
  "average": lambda: optimizers.chain([optax.lion(0.1), average_parameters(0.9)]),
}


def loss(params):
  return sum(jnp.sum((leaf - 0.5) ** 2) for leaf in jax.tree.leaves(params))


@jax.jit
def step(optimizer):
  return optimizer.apply_gradient(jax.grad(loss)(optimizer.target))


@jax.jit
def step_at(optimizer, learning_rate):
  return optimizer.apply_gradient(optimizer.target, learning_rate=learning_rate)


@pytest.fixture(params=OPTIMIZERS, scope="module")
def definition(request):
  return OPTIMIZERS[request.param]()


def assert_trees_equal(got, want):
  jax.tree.map(np.testing.assert_array_equal, got, want)
  assert jax.tree.structure(got) == jax.tree.structure(want)


@pytest.mark.slow
def test_loss_decreases_and_everything_stays_finite(definition):
  optimizer = definition.create(PARAMS)
  assert optimizer.state.step == 0
  for _ in range(20):
    optimizer = step(optimizer)
  assert optimizer.state.step == 20
  assert loss(optimizer.target) < 0.95 * loss(PARAMS)
  assert all(jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(optimizer))


def test_restored_optimizer_continues_bit_for_bit(definition):
  saved = step(step(definition.create(PARAMS)))
  stored = saved.state_dict()
  flat = traverse_util.flatten_dict(stored, keep_empty_nodes=True)
  assert all(isinstance(key, str) for path in flat for key in path)
  assert all(isinstance(value, jax.Array) for value in flat.values())
  assert set(stored) == {"target", "state"}
  on_disk = jax.device_get(stored)
  fresh = definition.create(jax.tree.map(jnp.zeros_like, PARAMS))
  restored = fresh.restore_state(on_disk)
  assert_trees_equal(restored, saved)
  assert_trees_equal(step(restored), step(saved))


def test_logical_axes_match_the_structure_and_the_shapes_of_the_state(definition):
  optimizer = definition.create(PARAMS)
  axes = definition.derive_logical_axes(optimizer, AXES)
  assert axes.target == AXES
  leaves, structure = jax.tree.flatten(optimizer.state.param_states)
  names = structure.flatten_up_to(axes.state.param_states)
  for leaf, name in zip(leaves, names, strict=True):
    assert name is None or len(name) == leaf.ndim
  shapes = {
    leaf.shape for leaf, name in zip(leaves, names, strict=True) if name == P("embed", "mlp")
  }
  assert shapes <= {(16, 24)}
  moments = [leaf for leaf in leaves if leaf.shape == (16, 24)]
  assert len(moments) == names.count(P("embed", "mlp"))


def test_logical_axes_of_adamw_are_those_of_its_moments():
  definition = OPTIMIZERS["chain"]()
  axes = definition.derive_logical_axes(definition.create(PARAMS), AXES).state.param_states
  adam_axes = axes[1][0]
  assert adam_axes.mu == adam_axes.nu == AXES
  assert adam_axes.count is None


def test_logical_axes_can_be_frozen_and_incomplete():
  partial = freeze({"dense": {"kernel": P("embed", "mlp")}})
  for name in ("adam", "adafactor unfactored"):
    definition = OPTIMIZERS[name]()
    axes = definition.derive_logical_axes(definition.create(PARAMS), partial).state.param_states
    found = [leaf for leaf in jax.tree.leaves(axes) if isinstance(leaf, P)]
    assert set(found) == {P("embed", "mlp")}


def test_optax_states_are_stored_with_t5x_names():
  stored = OPTIMIZERS["chain"]().create(PARAMS).state_dict()["state"]
  paths = {"/".join(path) for path in traverse_util.flatten_dict(stored)}
  moments = {
    f"param_states/1/0/{m}/{p}"
    for m in ("mu", "nu")
    for p in ("dense/kernel", "dense/bias", "norm/scale")
  }
  assert paths == moments | {"step", "param_states/1/0/count"}


def test_adafactor_states_are_stored_with_t5x_names():
  stored = OPTIMIZERS["adafactor"]().create(PARAMS).state_dict()["state"]
  assert set(stored["param_states"]["dense"]["kernel"]) == {"v_row", "v_col", "v", "m"}


@pytest.mark.slow
def test_learning_rate_of_the_trainer_affects_all_but_made_transformations():
  cases = {"adafactor": True, "multi": True, "adam": False, "muon": True, "schedule_free": True}
  for name, acts in cases.items():
    optimizer = OPTIMIZERS[name]().create(PARAMS)
    one, two = (step_at(optimizer, rate).target["dense"]["kernel"] for rate in (0.1, 0.2))
    assert bool(jnp.any(one != two)) == acts
    assert optimizer.optimizer_def.uses_learning_rate == acts


def test_hyperparameters_can_be_replaced_individually_or_together():
  definition = Adafactor(0.1)
  assert definition.update_hyper_params(learning_rate=0.5).learning_rate == 0.5
  assert definition.hyper_params.learning_rate == 0.1
  other = definition.hyper_params.replace(decay_rate=0.7)
  assert definition.update_hyper_params(hyper_params=other).decay_rate == 0.7
  multi = OPTIMIZERS["multi"]()
  assert [h.learning_rate for h in multi.update_hyper_params(learning_rate=0.5)] == [0.5, 0.5]
  assert [h.beta1 for h in multi.update_hyper_params()] == [None, 0.9]


def test_error_names_what_differs_in_the_state_of_another_optimizer():
  stored = OPTIMIZERS["sgd momentum"]().create(PARAMS).state_dict()
  with pytest.raises(ValueError, match=r"do not match.*at path \./param_states/0"):
    OPTIMIZERS["adam"]().create(PARAMS).restore_state(stored)


def test_multi_optimizer_keeps_parameters_that_no_traversal_visits():
  optimizer = OPTIMIZERS["multi, a part"]().create(PARAMS)
  after = step(optimizer)
  assert after.state.param_states["norm"]["scale"] is None
  assert_trees_equal(after.target["norm"], PARAMS["norm"])
  assert jnp.all(after.target["dense"]["kernel"] != PARAMS["dense"]["kernel"])


def test_multi_optimizer_updates_each_part_like_its_optimizer_alone():
  both = step(OPTIMIZERS["multi"]().create(PARAMS)).target
  alone = step(Adafactor(0.1).create(PARAMS)).target["dense"]["kernel"]
  np.testing.assert_array_equal(both["dense"]["kernel"], alone)
  momentum = step(Adafactor(0.01, beta1=0.9).create(PARAMS)).target
  np.testing.assert_array_equal(both["norm"]["scale"], momentum["norm"]["scale"])


@pytest.mark.slow
def test_multi_optimizer_passes_on_the_factor_rules():
  rules = Adafactor(0.1, logical_factor_rules={"x": "row", "y": "column", "l": "batch"})
  everything = traversal(lambda path: True)
  multi = MultiOptimizer([(everything, rules)])
  multi.set_param_axes({"w": P("l", "x", "y")})
  optimizer = multi.create({"w": jnp.ones((2, 3, 4))})
  assert optimizer.state.param_states["w"].v_row.shape == (2, 3)
  assert jnp.all(optimizer.apply_gradient({"w": jnp.ones((2, 3, 4))}).target["w"] < 1)


def test_error_names_the_parameter_of_two_optimizers():
  twice = MultiOptimizer([(KERNELS, Adafactor(0.1)), (KERNELS, Adafactor(0.1))])
  with pytest.raises(ValueError, match=r"number 1 and one before it, match .*'dense/kernel'"):
    twice.init_state(PARAMS)


def test_a_traversal_that_matches_nothing_is_an_error():
  misspelled = traversal(lambda path: "kernle" in path)
  with pytest.raises(ValueError, match=r"optimizer 1 .* matches no parameter"):
    MultiOptimizer([(KERNELS, Adafactor(0.1)), (misspelled, Adafactor(0.1))]).init_state(PARAMS)


def test_multi_optimizer_combines_adafactor_with_an_optimizer_of_optax():
  both = step(OPTIMIZERS["multi with optax"]().create(PARAMS))
  adafactor = step(Adafactor(0.1).create(PARAMS)).target
  np.testing.assert_array_equal(both.target["dense"]["kernel"], adafactor["dense"]["kernel"])
  adam = step(optimizers.adam(0.1).create(PARAMS)).target
  np.testing.assert_array_equal(both.target["norm"]["scale"], adam["norm"]["scale"])
  assert both.state.param_states["norm"]["scale"] is None
  assert both.state.param_states["optimizer_1"][0].count == 1


def test_wrapped_optimizers_keep_the_arguments_of_optax_for_gin():
  arguments = inspect.signature(optimizers.adamw).parameters
  assert list(arguments)[:3] == list(inspect.signature(optax.adamw).parameters)[:3]
  assert optimizers.adamw.__name__ == "adamw"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.seed. is deprecated:DeprecationWarning")
def test_dpsgd_uses_gradients_of_each_example():
  optimizer = optimizers.dpsgd(0.1, l2_norm_clip=1.0, noise_multiplier=0.0, seed=0).create(
    {"w": jnp.ones(2)}
  )
  after = optimizer.apply_gradient({"w": jnp.ones((3, 2))})
  assert jnp.all(after.target["w"] < 1)


def test_the_learning_rate_of_the_trainer_equals_one_of_optax():
  own = optimizers.chain([optax.clip_by_global_norm(1.0), optax.adamw(0.1)]).create(PARAMS)
  trainers = optimizers.chain([optax.clip_by_global_norm(1.0), optax.adamw]).create(PARAMS)
  for _ in range(2):
    own, trainers = step_at(own, 0.0), step_at(trainers, 0.1)
  assert_trees_equal(trainers.target, own.target)
  assert_trees_equal(trainers.state, own.state)


def test_error_names_a_function_that_must_be_called():
  with pytest.raises(ValueError, match=r"function clip_by_global_norm, .* write @clip_by_global"):
    optimizers.chain([optax.clip_by_global_norm])
  for whole in (optimizers.adamw(0.1), optimizers.adamw, Adafactor()):
    with pytest.raises(ValueError, match=r"a whole optimizer, (OptaxWrapper|Adafactor): write"):
      optimizers.chain([whole]).create(PARAMS)


def orthogonalized(matrix):
  """Muon's quintic Newton-Schulz iteration, in float64."""
  a, b, c = 3.4445, -4.7750, 2.0315
  x = matrix / np.linalg.norm(matrix)
  x = x.T if len(x) > len(x.T) else x
  for _ in range(5):
    gram = x @ x.T
    x = a * x + (b * gram + c * gram @ gram) @ x
  return x if x.shape == matrix.shape else x.T


@pytest.mark.slow
def test_muon_orthogonalizes_each_scanned_layer_and_expert_and_joined_heads():
  shapes = {
    "wi": ((6, 3, 4), P("embed", "layers", "mlp")),
    "experts": ((2, 6, 4), P("expert", "embed", "expert_mlp")),
    "query": ((6, 2, 4), P("embed", "heads", "kv")),
    "out": ((2, 4, 6), P("heads", "kv", "embed")),
  }
  params = {name: jnp.zeros(shape) for name, (shape, _) in shapes.items()}
  grads = {
    name: jnp.asarray(RNG.normal(size=shape), jnp.float32) for name, (shape, _) in shapes.items()
  }
  definition = optimizers.chain([muon])
  definition.set_param_axes({name: names for name, (_, names) in shapes.items()})
  after = definition.create(params).apply_gradient(grads, learning_rate=1.0).target
  g = {name: np.asarray(grad, np.float64) for name, grad in grads.items()}
  update = jax.tree.map(lambda x: -x / 0.2, after)
  rms = np.sqrt(6)  # of the larger dimension; 8 columns of the joined heads
  for layer in range(3):
    want = rms * orthogonalized(g["wi"][:, layer])
    np.testing.assert_allclose(update["wi"][:, layer], want, rtol=1e-3, atol=1e-4)
  for expert in range(2):
    want = rms * orthogonalized(g["experts"][expert])
    np.testing.assert_allclose(update["experts"][expert], want, rtol=1e-3, atol=1e-4)
  joined = {"query": g["query"].reshape(6, 8), "out": g["out"].reshape(8, 6)}
  for name, matrix in joined.items():
    want = np.sqrt(8) * orthogonalized(matrix).reshape(g[name].shape)
    np.testing.assert_allclose(update[name], want, rtol=1e-3, atol=1e-4)


def test_muon_leaves_tables_heads_and_vectors_to_adamw():
  axes = {
    "embedding": P("vocab", "embed"),
    "logits": P("embed", "vocab"),
    "bias": P("heads", "relpos_buckets"),
    "scale": P("embed"),
    "scales": P("embed", "layers"),
    "kernel": P("embed", "mlp"),
  }
  definition = optimizers.chain([muon])
  definition.set_param_axes(axes)
  state = definition.create({name: jnp.ones([4] * len(a)) for name, a in axes.items()}).state
  adam = state.param_states[0].inner_states["adam"].inner_state[0].nu
  assert {name for name, nu in adam.items() if hasattr(nu, "shape")} == axes.keys() - {"kernel"}


def test_an_average_of_the_parameters_is_evaluated():
  definition = OPTIMIZERS["average"]()
  optimizer = definition.create(PARAMS)
  want = PARAMS
  for _ in range(3):
    optimizer = step(optimizer)
    want = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, want, optimizer.target)
  average = definition.params_to_evaluate(optimizer.target, optimizer.state.param_states)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), average, want)


def test_error_says_that_the_average_must_be_last():
  chain = optimizers.chain([average_parameters(0.9), optax.adam])
  with pytest.raises(ValueError, match=r"average_parameters must be the last"):
    chain.create(PARAMS)


def test_schedule_free_evaluates_the_average_of_its_iterates():
  definition = OPTIMIZERS["schedule_free"]()
  optimizer = definition.create(PARAMS)
  iterates = []
  for _ in range(3):
    optimizer = step(optimizer)
    iterates.append(optimizer.state.param_states[0].z["norm"]["scale"])
  average = definition.params_to_evaluate(optimizer.target, optimizer.state.param_states)
  np.testing.assert_allclose(average["norm"]["scale"], np.mean(iterates, axis=0), rtol=1e-5)


def test_weight_decay_and_learning_rates_are_set_by_name():
  mask = all_except([".*/(bias|scale)"])
  assert mask(PARAMS) == IS_KERNEL
  scaled = optimizers.chain([optax.sgd(1.0), scale_by_name({"dense/.*": 0.5, "norm/scale": 0})])
  after = scaled.create(PARAMS).apply_gradient(jax.tree.map(jnp.ones_like, PARAMS)).target
  change = jax.tree.map(lambda old, new: round(float(jnp.max(old - new)), 5), PARAMS, after)
  assert change == {"dense": {"kernel": 0.5, "bias": 0.5}, "norm": {"scale": 0}}


def test_error_names_a_pattern_that_matches_no_parameter():
  with pytest.raises(ValueError, match=r"'norm/scales' matches no parameter.*'norm/scale'"):
    all_except(["norm/scales"])(PARAMS)
  with pytest.raises(ValueError, match=r"'\*/scale' is not a regular expression"):
    all_except(["*/scale"])(PARAMS)


def test_a_users_rule_gives_the_axes_of_its_type_of_state(monkeypatch):
  rules = optimizers.OptaxStatePartitionRules

  def rule(state, axes):
    return optax.TraceState({"mine": rules.derive_optax_logical_axes(state.trace, axes)})

  monkeypatch.setitem(rules._RULES, optax.TraceState, rule)
  state = optax.chain(optax.trace(0.9), optax.scale_by_adam()).init(PARAMS)
  mine, adam = rules.derive_optax_logical_axes(state, AXES, PARAMS)
  assert mine.trace == {"mine": AXES}
  assert adam.mu == AXES
