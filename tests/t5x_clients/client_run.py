"""What the programs have in common: two training steps."""

from __future__ import annotations

import jax

from t5x import trainer, utils


def train_two_steps(model, train_state, partitioner, train_state_axes, batches):
  """Returns the state after two steps, and the values of their metrics."""
  with trainer.Trainer(
    model=model,
    train_state=train_state,
    partitioner=partitioner,
    eval_names=[],
    summary_dir=None,
    train_state_axes=train_state_axes,
    rng=jax.random.PRNGKey(1),
    learning_rate_fn=utils.create_learning_rate_scheduler("constant", base_learning_rate=0.1),
    num_microbatches=None,
  ) as run:
    values = run.train(iter(batches), 2).result()
  return run.train_state, values
