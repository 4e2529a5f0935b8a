"""T5X's own numbers for one small T5 1.1: initial values, logits, gradients, decodes, training."""

from __future__ import annotations

import functools
import itertools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tiny_models import adafactor, feature, logits_of

from rosetta_t5.checkpoints import TrainStateInitializer
from rosetta_t5.models import EncoderDecoderModel
from rosetta_t5.networks.transformer import T5Config, Transformer
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.training import train_step
from rosetta_t5.training.schedules import create_learning_rate_scheduler

# As in adafactor.gin.
CONFIG = T5Config(
  vocab_size=384,
  emb_dim=64,
  num_heads=4,
  num_encoder_layers=2,
  num_decoder_layers=2,
  head_dim=16,
  mlp_dim=128,
  mlp_activations=("gelu", "linear"),
  dropout_rate=0.0,
)
VOCABULARY = types.SimpleNamespace(eos_id=1, vocab_size=259)
MODEL = EncoderDecoderModel(Transformer(CONFIG), VOCABULARY, VOCABULARY, adafactor(), z_loss=0.0001)


@pytest.fixture(scope="module")
def numbers(shared):
  with np.load(shared / "reference/forward_and_decode.npz") as arrays:
    return dict(arrays)


@pytest.fixture(scope="module")
def batch(numbers):
  names = [name for name in numbers if name.startswith("batch/")]
  return {name.removeprefix("batch/"): jnp.asarray(numbers[name]) for name in names}


@pytest.fixture(scope="module")
def initial(shared):
  """The initial train state of a run with seed 0, created as the run creates it."""
  shapes = dict.fromkeys(("encoder_input_tokens", "decoder_input_tokens"), (16, 64))
  initializer = TrainStateInitializer(
    adafactor(), MODEL.get_initial_variables, shapes, PjitPartitioner(num_partitions=1)
  )
  key, _ = jax.random.split(jax.random.PRNGKey(0), 2)
  return jax.device_get(initializer.from_scratch(key))


@pytest.fixture(scope="module")
def params(shared, initial):
  """Parameters by step: the initial ones of seed 0, and T5X's after 20 steps."""
  return {0: initial.params, 20: stored(shared, 20)}


def stored(shared, step):
  """Returns the parameters of a checkpoint that T5X wrote."""
  path = shared / f"reference/t5x_orbax/checkpoint_{step}/state"
  handler = ocp.PyTreeCheckpointHandler()
  as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
  args = jax.tree.map(lambda _: as_numpy, handler.metadata(path).tree)
  return handler.restore(path, args=ocp.args.PyTreeRestore(restore_args=args))["target"]


@functools.cache
def forward():
  def run(params, batch):
    (loss, _), grads = jax.value_and_grad(MODEL.loss_fn, has_aux=True)(params, batch, None)
    norms = jax.tree.map(lambda grad: jnp.linalg.norm(grad.reshape(-1)), grads)
    return loss, logits_of(MODEL.module, params, batch), norms, MODEL.score_batch(params, batch)

  return jax.jit(run)


def test_the_seed_gives_the_initial_parameters_of_t5x(shared, initial):
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7),
    initial.params.unfreeze(),
    stored(shared, 0),
  )


@pytest.mark.parametrize("step", [0, 20])
def test_loss_logits_gradients_and_scores_equal_those_of_t5x(numbers, batch, params, step):
  loss, logits, norms, scores = forward()(params[step], batch)
  np.testing.assert_allclose(loss, numbers[f"loss_step{step}"], rtol=1e-6)
  np.testing.assert_allclose(logits[:2], numbers[f"logits_step{step}"], atol=1e-4)
  np.testing.assert_allclose(scores, numbers[f"score_step{step}"], atol=1e-3)
  paths = jax.tree_util.tree_leaves_with_path(norms)
  got = {jax.tree_util.keystr(path, simple=True, separator="/"): norm for path, norm in paths}
  prefix = f"grad_norm_step{step}/"
  expected = {n.removeprefix(prefix): v for n, v in numbers.items() if n.startswith(prefix)}
  assert got.keys() == expected.keys()
  for name, norm in got.items():
    np.testing.assert_allclose(norm, expected[name], rtol=1e-4, err_msg=name)


def test_greedy_decodes_equal_those_of_t5x(numbers, batch, params):
  got = jax.jit(MODEL.predict_batch)(params[20], batch)
  np.testing.assert_array_equal(got, numbers["greedy_step20"])


def test_beam_search_gives_the_decodes_and_scores_of_t5x(numbers, batch, params):
  search = functools.partial(MODEL.predict_batch_with_aux, num_decodes=4, return_all_decodes=True)
  decodes, aux = jax.jit(search)(params[20], batch)
  np.testing.assert_array_equal(decodes, numbers["beam4_step20"])
  np.testing.assert_allclose(aux["scores"], numbers["beam4_scores_step20"], atol=1e-4)


def batches(shared):
  """Yields the run's batches: lines of bytes (shifted by 3 special ids), upper-cased, 16 at a time."""

  def rows(lines):
    ids = np.zeros((len(lines), 64), np.int32)
    for row, line in zip(ids, lines, strict=True):
      tokens = [byte + 3 for byte in line[:63]] + [1]
      row[: len(tokens)] = tokens
    return ids

  lines = (shared / "reference/lines.txt").read_bytes().splitlines()
  for start in itertools.count(0, 16):
    chosen = lines[start : start + 16]
    yield feature(rows(chosen), rows([line.upper() for line in chosen]))


def test_fifteen_steps_give_every_metric_of_t5x(shared, initial, batch):
  expected = json.loads((shared / "reference/adafactor_metrics.json").read_text())
  schedule = create_learning_rate_scheduler("constant * rsqrt_decay", 1.0, warmup_steps=100)
  step = jax.jit(functools.partial(train_step, loss_fn=MODEL.loss_fn, learning_rate_fn=schedule))
  _, key = jax.random.split(jax.random.PRNGKey(0), 2)
  state, feed = jax.device_put(initial), batches(shared)
  # The last five are for tests/test_run.py: from there on, small differences grow.
  for number in range(1, 16):
    drawn = next(feed)
    if number == 1:
      jax.tree.map(np.testing.assert_array_equal, drawn, batch)
    state, metrics = step(state, drawn, key)
    got = {n: m.compute() for n, m in metrics.items() if not n.startswith(("timing/", "first_"))}
    wanted = expected[str(number)]
    assert got.keys() - wanted.keys() == {
      "weight_gradient_norm"
    }  # T5X's metrics that compute weights
    for name, value in wanted.items():
      np.testing.assert_allclose(got[name], value, rtol=1e-4, err_msg=f"{name}, step {number}")
