"""fp8 and the fused kernels are used on a GPU, and are correct there.

`pytest -m gpu tests/test_on_gpu.py`; benchmarks/gpu.sh begins with it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rosetta_t5.kernels.attention import Operands, Visibility, attend
from rosetta_t5.kernels.fp8 import fp8_matmul
from rosetta_t5.kernels.xla_attention import xla_attention
from rosetta_t5.networks.precision import TransformerEngineConfig, choose_fp8

pytestmark = pytest.mark.gpu
RNG = np.random.default_rng(0)


def test_fp8_matmuls_run_on_fp8_tensor_cores():
  x, w, dy = (jnp.asarray(RNG.normal(size=(256, 256)), jnp.bfloat16) for _ in range(3))
  step = jax.jit(lambda x, w, dy: (fp8_matmul(x, w), jax.vjp(fp8_matmul, x, w)[1](dy)))
  assert step.lower(x, w, dy).compile().as_text().count("__cublas$lt$matmul$f8") == 3
  for got, want in zip(jax.tree.leaves(step(x, w, dy)), (x @ w, dy @ w.T, x.T @ dy), strict=True):
    error = jnp.linalg.norm((got - want).astype(jnp.float32))
    assert error < 0.08 * jnp.linalg.norm(want.astype(jnp.float32))


def test_stacked_kernels_are_one_fp8_matmul():
  x = jnp.asarray(RNG.normal(size=(8, 32, 256)), jnp.bfloat16)
  w = jnp.asarray(RNG.normal(size=(256, 3, 128)), jnp.bfloat16)
  assert jax.jit(fp8_matmul).lower(x, w).compile().as_text().count("__cublas$lt$matmul$f8") == 1


def test_fp8_is_on_by_default_if_the_hardware_supports_it():
  assert choose_fp8(TransformerEngineConfig()).matmul is not None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
def test_fused_attention_and_its_gradients_equal_the_reference(kernel, causal):
  batch, length, heads, size = 4, 256, 4, 64
  q, k, v, do = (
    jnp.asarray(RNG.normal(size=(batch, length, heads, size)) / 4, jnp.bfloat16) for _ in range(4)
  )
  bias = jnp.asarray(RNG.normal(size=(1, heads, length, length)), jnp.bfloat16)
  lengths = np.array([256, 200, 64, 17])
  ids = (np.arange(length) < lengths[:, None]).astype(np.int32)
  if kernel == "flash":
    ids *= 1 + (np.arange(length) >= 100)  # two examples per row
  mask = (ids[:, None, :, None] == ids[:, None, None]) & (ids > 0)[:, None, None]
  if causal:
    mask &= np.tri(length, dtype=bool)
  # The outputs at padding are not used.
  do = do * jnp.asarray(ids > 0)[..., None, None]
  segments = Visibility(jnp.asarray(ids), jnp.asarray(ids), causal=causal)
  fused = jax.jit(lambda q, k, v, b: attend(kernel, Operands(q, k, v, b, segments)))
  exact = functools.partial(xla_attention, mask_B1TS=jnp.asarray(mask), float32_logits=True)
  got, gradients = jax.vjp(fused, q, k, v, bias)
  want, want_gradients = jax.vjp(exact, *(x.astype(jnp.float32) for x in (q, k, v, bias)))
  real = np.asarray(ids > 0)
  np.testing.assert_allclose(np.asarray(got, np.float32)[real], np.asarray(want)[real], atol=2e-2)
  for mine, theirs in zip(gradients(do), want_gradients(do.astype(jnp.float32)), strict=True):
    scale = float(jnp.abs(theirs).max())
    np.testing.assert_allclose(np.asarray(mine, np.float32), theirs, atol=0.02 * scale)


@pytest.mark.parametrize("kernel", ["xla", "cudnn", "flash"])
def test_training_steps_of_every_kernel_agree(kernel):
  from rosetta_t5 import cli
  from rosetta_t5.cli import bench

  argv = ["bench", "--size", "tiny", "--batch", "8", "--lengths", "64", "32", "--steps", "5"]
  rows = {
    name: bench.measure_program(args, bench.compile_step(args))
    for name in dict.fromkeys(["xla", kernel])
    if (args := cli.parse([*argv, "--kernel", name]))
  }
  losses = [row["loss_per_token"] for row in rows.values()]
  np.testing.assert_allclose(losses, losses[0], rtol=5e-3)


def test_cudnn_returns_nan_for_padding_between_tokens():
  q = jnp.ones((1, 64, 2, 64), jnp.bfloat16)
  bias = jnp.zeros((1, 2, 64, 64), jnp.bfloat16)
  ids = jnp.ones((1, 64), jnp.int32)
  for gapped, is_nan in ((ids, False), (ids.at[0, 3].set(0), True)):
    out = attend("cudnn", Operands(q, q, q, bias, Visibility(gapped, gapped)))
    assert bool(jnp.isnan(out).any()) == is_nan
