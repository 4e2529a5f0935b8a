"""Adafactor against its definition in float64 NumPy, one parameter at a time."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from rosetta_t5.training.optimizers.adafactor import Adafactor
from rosetta_t5.training.optimizers.factor_rules import HParamMap, standard_logical_factor_rules

RNG = np.random.default_rng(0)
LEARNING_RATE = 0.03
EPSILON1, EPSILON2 = 1e-30, 1e-3


class PlainAdafactor:
  """One matrix or vector, as the paper and T5's settings define it, in float64."""

  def __init__(
    self, factored, beta1=None, decay_rate=0.8, weight_decay=0.0, clipping=1.0, relative=True
  ):
    self.factored, self.beta1, self.decay_rate = factored, beta1, decay_rate
    self.weight_decay, self.clipping, self.relative = weight_decay, clipping, relative
    self.rows = self.cols = self.v = self.m = 0.0
    self.t = 0

  def update(self, x, g):
    x, g = x.astype(np.float64), g.astype(np.float64)
    self.t += 1
    beta2 = 1 - self.t**-self.decay_rate
    squared = g**2 + EPSILON1
    if self.factored:
      self.rows = beta2 * self.rows + (1 - beta2) * squared.mean(1)
      self.cols = beta2 * self.cols + (1 - beta2) * squared.mean(0)
      v = np.outer(self.rows, self.cols) / self.rows.mean()
    else:
      v = self.v = beta2 * self.v + (1 - beta2) * squared
    u = g / np.sqrt(v)
    if self.clipping:
      u = u / max(1, math.sqrt((u**2).mean()) / self.clipping)
    step = LEARNING_RATE * (max(EPSILON2, math.sqrt((x**2).mean())) if self.relative else 1.0)
    delta = step * u
    if self.beta1 is not None:
      delta = self.m = self.beta1 * self.m + (1 - self.beta1) * delta
    return (1 - self.weight_decay) * x - delta


def run(optimizer, params, grads_by_step, axes=None):
  """Returns the parameters and the state after one jitted step for each of the gradients."""
  if axes is not None:
    optimizer.set_param_axes(axes)
  state = optimizer.create(params)
  update = jax.jit(lambda state, grads: state.apply_gradient(grads, learning_rate=LEARNING_RATE))
  for grads in grads_by_step:
    state = update(state, grads)
  return jax.device_get(state.target), jax.device_get(state.state)


def normal(*shape):
  return RNG.normal(size=shape).astype(np.float32)


SETTINGS = {
  "factored": ({}, {}),
  "unfactored": ({"factored": False}, {"factored": False}),
  "momentum": ({"beta1": 0.9}, {"beta1": 0.9}),
  "weight decay": ({"weight_decay_rate": 0.1}, {"weight_decay": 0.1}),
  "decay from the learning rate": (
    {"weight_decay_rate": 0.5, "weight_decay_rate_lr_exponent": 2.0},
    {"weight_decay": 0.5 * LEARNING_RATE**2},
  ),
  "decay by exponent alone": (
    {"weight_decay_rate_lr_exponent": 1.0},
    {"weight_decay": LEARNING_RATE},
  ),
  "clipping": ({"clipping_threshold": 0.5}, {"clipping": 0.5}),
  "no clipping": ({"clipping_threshold": None}, {"clipping": None}),
  "absolute steps": ({"multiply_by_parameter_scale": False}, {"relative": False}),
  "decay rate": ({"decay_rate": 0.5}, {"decay_rate": 0.5}),
}


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("setting", SETTINGS)
def test_updates_follow_the_definition(setting):
  ours, plain = SETTINGS[setting]
  params = {"w": normal(24, 40), "b": normal(24) * 1e-5}
  grads = [{"w": normal(24, 40) * 10.0**i, "b": normal(24)} for i in range(5)]
  got, _ = run(Adafactor(min_dim_size_to_factor=16, **ours), params, grads)
  for name, may_factor in (("w", True), ("b", False)):
    want = params[name]
    rule = PlainAdafactor(**{"factored": True} | plain)
    rule.factored = rule.factored and may_factor
    for step in grads:
      want = rule.update(want, step[name])
    np.testing.assert_allclose(got[name], want, rtol=2e-5, atol=1e-8, err_msg=name)


def test_larger_dimension_is_the_column():
  # Rows are the smaller dimension whichever comes first, so a transposed problem is the same problem.
  params, grads = normal(40, 24), [normal(40, 24) for _ in range(3)]
  tall, tall_state = run(Adafactor(min_dim_size_to_factor=16), params, grads)
  wide, wide_state = run(Adafactor(min_dim_size_to_factor=16), params.T, [g.T for g in grads])
  np.testing.assert_allclose(tall, wide.T, rtol=1e-5)
  assert tall_state.param_states.v_row.shape == wide_state.param_states.v_row.shape == (24,)


def test_stacked_parameters_are_updated_like_separate_parameters():
  axes = {"w": P("embed", "layers", "mlp"), "scale": P("layers", "embed")}
  scales = np.array([1.0, 10.0, 0.1], np.float32)  # so that averages over the stack would show
  params = {"w": normal(20, 3, 32) * scales[:, None], "scale": normal(3, 20) * scales[:, None]}
  grads = [
    {"w": normal(20, 3, 32) * scales[:, None], "scale": normal(3, 20) * scales[:, None]}
    for _ in range(4)
  ]
  rules = standard_logical_factor_rules()
  got, state = run(Adafactor(beta1=0.9, logical_factor_rules=rules), params, grads, axes)
  for layer in range(3):
    matrix, vector = PlainAdafactor(True, beta1=0.9), PlainAdafactor(False, beta1=0.9)
    want_w, want_scale = params["w"][:, layer], params["scale"][layer]
    for step in grads:
      want_w = matrix.update(want_w, step["w"][:, layer])
      want_scale = vector.update(want_scale, step["scale"][layer])
    np.testing.assert_allclose(got["w"][:, layer], want_w, rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(got["scale"][layer], want_scale, rtol=2e-5, atol=1e-7)
  assert state.param_states["w"].v_row.shape == (20, 3)
  assert state.param_states["w"].v_col.shape == (3, 32)
  assert state.param_states["scale"].v.shape == (3, 20)


def test_several_column_dimensions_are_treated_as_one():
  # [embed, heads, kv] by its rules is [embed, joined_kv] by its.
  params, grads = normal(20, 4, 8), [normal(20, 4, 8) for _ in range(3)]
  rules = standard_logical_factor_rules()
  got, state = run(
    Adafactor(logical_factor_rules=rules),
    {"q": params},
    [{"q": g} for g in grads],
    {"q": P("embed", "heads", "kv")},
  )
  rule, want = PlainAdafactor(True), params.reshape(20, 32)
  for g in grads:
    want = rule.update(want, g.reshape(20, 32))
  np.testing.assert_allclose(got["q"].reshape(20, 32), want, rtol=2e-5, atol=1e-7)
  assert state.param_states["q"].v_row.shape == (20,)
  assert state.param_states["q"].v_col.shape == (4, 8)


@pytest.mark.slow
def test_step_offset_restarts_the_averages():
  optimizer = Adafactor(LEARNING_RATE, step_offset=1000).create(normal(4))
  old = optimizer.state.replace(step=jnp.int32(1000), param_states=optimizer.state.param_states)
  old = old.replace(param_states=old.param_states.replace(v=jnp.full(4, 9.0)))
  g1, g2 = normal(4), normal(4)
  first = optimizer.replace(state=old).apply_gradient(g1)
  # At the offset t is 1 and the decay 0: the second moment is that gradient's alone.
  np.testing.assert_allclose(first.state.param_states.v, g1**2, rtol=1e-6)
  second = first.apply_gradient(g2).state
  decay = 1 - 2**-0.8
  np.testing.assert_allclose(second.param_states.v, decay * g1**2 + (1 - decay) * g2**2, rtol=1e-5)
  assert second.step == 1002


def test_global_norm_clipping_scales_all_gradients_together():
  params = {"a": normal(4), "b": normal(4, 4)}
  grads = {"a": normal(4) * 3, "b": normal(4, 4) * 3}
  norm = math.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
  _, clipped = run(Adafactor(global_norm_clip_threshold=0.5), params, [grads])
  for name in grads:
    want = (grads[name] * 0.5 / norm) ** 2
    np.testing.assert_allclose(clipped.param_states[name].v, want, rtol=1e-5)
  _, kept = run(Adafactor(global_norm_clip_threshold=1e3), params, [grads])
  np.testing.assert_allclose(kept.param_states["a"].v, grads["a"] ** 2, rtol=1e-5)


def test_zero_gradients_keep_the_parameters_and_produce_no_nan():
  params = {"a": normal(4)}
  got, _ = run(Adafactor(global_norm_clip_threshold=1.0), params, [{"a": np.zeros(4, np.float32)}])
  np.testing.assert_array_equal(got["a"], params["a"])


def test_parameter_scale_can_be_limited():
  big = np.full(4, 100.0, np.float32)
  got, _ = run(Adafactor(max_parameter_scale=2.0), big, [np.ones(4, np.float32)])
  np.testing.assert_allclose(big - got, 2.0 * LEARNING_RATE, rtol=1e-4)


def test_parameter_scaling_can_be_chosen_by_parameter():
  relative = HParamMap([("kernel$", True), (".*", False)])
  params = {"kernel": np.full(4, 10.0, np.float32), "bias": np.full(4, 10.0, np.float32)}
  ones = {"kernel": np.ones(4, np.float32), "bias": np.ones(4, np.float32)}
  got, _ = run(Adafactor(multiply_by_parameter_scale=relative), params, [ones])
  np.testing.assert_allclose(10 - got["kernel"], 10 * LEARNING_RATE, rtol=1e-4)
  np.testing.assert_allclose(10 - got["bias"], LEARNING_RATE, rtol=1e-4)


def test_nan_updates_are_skipped_if_configured():
  params, good = normal(4), normal(4)
  bad = good.copy()
  bad[1] = np.nan
  kept, state = run(Adafactor(skip_nan_updates=True, clipping_threshold=None), params, [bad])
  assert np.isnan(run(Adafactor(), params, [bad])[0]).all()
  assert kept[1] == params[1]
  assert state.param_states.v[1] == 0
  assert (np.delete(kept, 1) != np.delete(params, 1)).all()


def test_momentum_can_be_stored_in_bfloat16():
  _, state = run(Adafactor(beta1=0.9, dtype_momentum="bfloat16"), normal(4), [normal(4)])
  assert state.param_states.m.dtype == jnp.bfloat16


def test_parameters_keep_their_dtype():
  got, _ = run(Adafactor(), jnp.ones(4, jnp.bfloat16), [jnp.ones(4, jnp.bfloat16)])
  assert got.dtype == jnp.bfloat16


def test_unused_moments_are_zeros_of_shape_1():
  _, state = run(Adafactor(min_dim_size_to_factor=4), {"w": normal(8, 8), "b": normal(8)}, [])
  w, b = state.param_states["w"], state.param_states["b"]
  assert [s.shape for s in (w.v_row, w.v_col, w.v, w.m)] == [(8,), (8,), (1,), (1,)]
  assert [s.shape for s in (b.v_row, b.v_col, b.v, b.m)] == [(1,), (1,), (8,), (1,)]


def test_step_needs_no_memory_besides_its_state():
  # With an intermediate array that reductions and the update share, the step takes twice as long.
  params = jnp.ones((512, 1024))
  for kwargs in ({}, {"factored": False}, {"beta1": 0.9}):
    optimizer = Adafactor(learning_rate=0.1, **kwargs).create(params)
    update = jax.jit(lambda o, g: o.apply_gradient(g), donate_argnums=0)
    memory = update.lower(optimizer, params).compile().memory_analysis()
    assert memory.temp_size_in_bytes < params.nbytes / 10, kwargs


def test_state_has_the_names_shapes_and_axes_of_t5x(shared):
  lines = (shared / "reference" / "model-info.txt").read_text().splitlines()
  listed = [re.match(r"Variable (\S+) +size \d+ +shape \((.*?)\) ", line) for line in lines]
  shapes = {m[1]: m[2] for m in listed if m}
  params, axes = {}, {}
  for name, shape in shapes.items():
    if not name.startswith(("param_states", "step")):
      sizes = dict(part.split("=") for part in shape.split(", "))
      params[name] = jax.ShapeDtypeStruct(tuple(map(int, sizes.values())), jnp.float32)
      axes[name] = P(*sizes)
  optimizer = Adafactor(decay_rate=0.8, logical_factor_rules=standard_logical_factor_rules())
  optimizer.set_param_axes(axes)
  state = jax.eval_shape(optimizer.create, params)
  named = optimizer.derive_logical_axes(state, axes).state.param_states
  seen = 0
  for name, moments in state.state.param_states.items():
    for slot in ("m", "v", "v_col", "v_row"):
      listed_shape = shapes[f"param_states/{name}/{slot}"]
      sizes, slot_axes = getattr(moments, slot).shape, getattr(named[name], slot)
      if slot_axes is None:
        assert listed_shape == ", ".join(map(str, sizes)) + ("," if len(sizes) == 1 else "")
      else:
        assert listed_shape == ", ".join(f"{a}={n}" for a, n in zip(slot_axes, sizes, strict=True))
      seen += 1
  assert seen == sum(name.startswith("param_states") for name in shapes)


def test_contradicting_arguments_are_rejected():
  with pytest.raises(ValueError, match=r"factor_map has no effect with factored = False"):
    Adafactor(factored=False, factor_map=HParamMap([]))
