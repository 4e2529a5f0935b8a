"""fp8 matmuls: rounding, scaling and gradients, compared with float32."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from rosetta_t5.kernels.fp8 import FORWARD, GRADIENT, fp8_matmul, quantize

RNG = np.random.default_rng(3)
X = RNG.normal(size=(48, 32)).astype(np.float32)
W = RNG.normal(size=(32, 24)).astype(np.float32) / 6
DY = RNG.normal(size=(48, 24)).astype(np.float32)


def relative_error(got, want):
  return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


@pytest.mark.parametrize("factor", [1e-20, 1e-3, 1.0, 7e8])
@pytest.mark.parametrize(("dtype", "half_step"), [(FORWARD, 2**-4), (GRADIENT, 2**-3)])
def test_values_are_rounded_to_the_nearest_fp8_number_at_every_scale(factor, dtype, half_step):
  x = np.linspace(1 / 64, 1, 200, dtype=np.float32) * np.float32(factor)
  quantized, scale = quantize(jnp.asarray(x), dtype)
  assert quantized.dtype == dtype
  assert np.log2(float(scale)) % 1 == 0
  highest = float(jnp.max(quantized.astype(jnp.float32)))
  largest = float(jnp.finfo(dtype).max)
  assert largest / 2 * (1 - half_step) <= highest <= largest
  back = np.asarray(quantized.astype(jnp.float32)) * float(scale)
  assert np.max(np.abs(back - x) / x) <= half_step * 1.001


@pytest.mark.slow
def test_zeros_stay_zeros_and_non_finite_values_become_nan():
  assert not np.asarray(fp8_matmul(jnp.zeros((4, 32)), jnp.asarray(W))).any()
  for bad in (np.inf, np.nan):
    x = X.copy()
    x[3, 5] = bad
    assert np.isnan(np.asarray(fp8_matmul(jnp.asarray(x), jnp.asarray(W)))[3]).all()


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matmul_and_gradients_equal_float32_up_to_rounding(dtype):
  x, w, dy = (jnp.asarray(array, dtype) for array in (X, W, DY))
  y, gradients = jax.vjp(fp8_matmul, x, w)
  dx, dw = gradients(dy)
  assert {array.dtype for array in (y, dx, dw)} == {jnp.dtype(dtype)}
  # Relative rounding errors are random, up to 1/16 forward and 1/8 backward.
  for got, want in ((y, X @ W), (dx, DY @ W.T), (dw, X.T @ DY)):
    assert 0.01 < relative_error(got, want) < 0.07


def test_numbers_that_just_fit_use_the_whole_range_of_a_scale():
  for dtype, largest in ((FORWARD, 448.0), (GRADIENT, 57344.0)):
    for power in (-3, 0, 4):
      quantized, scale = quantize(jnp.array([largest * 2.0**power, 1.0]), dtype)
      assert float(scale) == 2.0**power
      assert float(quantized[0]) == largest
      _, larger = quantize(jnp.array([largest * 2.0**power * 1.001]), dtype)
      assert float(larger) == 2.0 ** (power + 1)


def test_forward_operands_are_e4m3_and_gradients_e5m2():
  def types(function, *args):
    text = jax.jit(function).lower(*args).as_text()
    return re.findall(r"stablehlo.convert %\w+ : .*-> tensor<(.*)x(f8E4M3FN|f8E5M2)>", text)

  assert types(fp8_matmul, X, W) == [("48x32", "f8E4M3FN"), ("32x24", "f8E4M3FN")]
  both = types(lambda *args: jax.vjp(fp8_matmul, *args[:2])[1](args[2]), X, W, DY)
  assert both == [("48x32", "f8E4M3FN"), ("32x24", "f8E4M3FN"), ("48x24", "f8E5M2")]


@pytest.mark.slow
def test_rows_and_outputs_may_have_several_dimensions():
  y, gradients = jax.vjp(fp8_matmul, jnp.asarray(X), jnp.asarray(W))
  rows, outputs = X.reshape(6, 8, 32), W.reshape(32, 3, 8)
  split, split_gradients = jax.vjp(fp8_matmul, jnp.asarray(rows), jnp.asarray(outputs))
  np.testing.assert_array_equal(split.reshape(48, 24), y)
  for got, want in zip(
    split_gradients(jnp.asarray(DY.reshape(6, 8, 3, 8))), gradients(jnp.asarray(DY)), strict=True
  ):
    np.testing.assert_allclose(got.reshape(want.shape), want, rtol=1e-5, atol=1e-6)


@pytest.fixture
def mesh():
  """Eight devices, on three mesh axes."""
  with jax.set_mesh(jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)):
    yield


@pytest.mark.slow
@pytest.mark.usefixtures("mesh")
def test_each_part_of_an_array_has_its_own_scale():
  # With one scale for all parts, e4m3 would round the small ones to zero.
  parts, split = (2, 2, 2), ("a", "b", "c")
  rows, inner, outputs = (
    np.repeat(10.0 ** -np.arange(0, 4 * count, 4, dtype=np.float32), size // count)
    for count, size in zip(parts, (48, 32, 24), strict=True)
  )
  x, w, dy = X * rows[:, None] / inner, W * inner[:, None] * outputs, DY / outputs
  y, gradients = jax.vjp(lambda x, w: fp8_matmul(x, w, split), jnp.asarray(x), jnp.asarray(w))
  y, dx, dw = (np.asarray(array) for array in (y, *gradients(jnp.asarray(dy))))
  for got, want in (
    (y / rows[:, None] / outputs, X @ W),
    (dx / inner, DY @ W.T),
    (dw * inner[:, None] * outputs, (X * rows[:, None]).T @ DY),
  ):
    assert 0.01 < relative_error(got, want) < 0.07


@pytest.mark.slow
@pytest.mark.usefixtures("mesh")
def test_rows_and_outputs_with_several_dimensions_may_have_parts():
  rows, outputs, dy = (
    X.reshape(2, 24, 32),
    W.reshape(32, 3, 8),
    jnp.asarray(DY.reshape(2, 24, 3, 8)),
  )
  split = ("a", None, "b", None, "c")
  y, gradients = jax.vjp(lambda x, w: fp8_matmul(x, w, split), *map(jnp.asarray, (rows, outputs)))
  dx, dw = gradients(dy)
  for got, want in ((y, X @ W), (dx, DY @ W.T), (dw, X.T @ DY)):
    assert 0.01 < relative_error(got.reshape(want.shape), want) < 0.07
