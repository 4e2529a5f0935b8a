"""One training step of each T5 family, compared with recorded numbers.

Run `python tests/networks/test_golden_steps.py` to record them again after an intended change.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

if __name__ == "__main__":
  sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from tiny_models import T5_1_0, T5_1_1, initialize, make_batch, make_model, make_state

from rosetta_t5.networks.transformer import T5Config, Transformer
from rosetta_t5.training import train_step

GOLDEN = pathlib.Path(__file__).with_name("golden_steps.json")
HOW = (
  "Per model of tests/tiny_models.py: loss of make_batch(), global norm of the gradients, global norm "
  "of one Adafactor update at learning rate 0.1; z_loss = 1e-4. initial_norm: global norm of the "
  "parameters that seed 0 gives. Written by `python tests/networks/test_golden_steps.py` on a CPU."
)
CONFIGS = {
  "T5 1.0": T5_1_0,
  "T5 1.1": T5_1_1,
  "T5 1.1, dropout 0.1": dataclasses.replace(T5_1_1, dropout_rate=0.1),
}


def step(name: str) -> dict[str, float]:
  """Returns the numbers of one step."""
  module = Transformer(CONFIGS[name])

  def norms(gradients, old_state, new_state):
    update = jax.tree.map(jnp.subtract, new_state.params, old_state.params)
    return {"grad_norm": optax.tree.norm(gradients), "update_norm": optax.tree.norm(update)}

  compiled = jax.jit(
    functools.partial(
      train_step,
      loss_fn=make_model(module, z_loss=1e-4).loss_fn,
      learning_rate_fn=lambda step: jnp.float32(0.1),
      weight_metrics=norms,
    )
  )
  _, metrics = compiled(make_state(module), make_batch(), jax.random.PRNGKey(0))
  loss = float(metrics["loss"].compute())
  return {"loss": loss, **{name: float(metrics[name]) for name in ("grad_norm", "update_norm")}}


def initial_norm(config: T5Config) -> float:
  initial = functools.partial(initialize, Transformer(config))
  return float(jax.jit(lambda key: optax.tree.norm(initial(key)["params"]))(jax.random.PRNGKey(0)))


def test_the_seed_gives_the_recorded_parameters():
  assert initial_norm(T5_1_1) == pytest.approx(json.loads(GOLDEN.read_text())["initial_norm"])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_gives_the_recorded_numbers(name):
  assert step(name) == pytest.approx(json.loads(GOLDEN.read_text())[name], rel=1e-5)


if __name__ == "__main__":
  recorded = {"how": HOW, "initial_norm": initial_norm(T5_1_1), **{n: step(n) for n in CONFIGS}}
  GOLDEN.write_text(json.dumps(recorded, indent=2) + "\n")
