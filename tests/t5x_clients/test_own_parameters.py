"""Programs of the kinds that are published on T5X: from a subclass, through two steps, to a restore."""

from __future__ import annotations

import functools
import pathlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from client_run import train_two_steps
from flax import traverse_util
from flax.core import freeze, unfreeze
from flax.linen import partitioning as flax_partitioning
from tiny_models import T5_1_1, make_batch, make_model

from t5x import adafactor, checkpoints, optimizers, partitioning, train_state, utils
from t5x.examples.t5 import layers, network

SHAPES = {"encoder_input_tokens": (8, 10), "decoder_input_tokens": (8, 6)}


def train_and_restore(model, partitioner, tmp_path, checkpointer_cls=None):
  """Trains two steps, saves, and returns the first state, the last one, and the restored one."""
  initializer = utils.TrainStateInitializer(
    optimizer_def=model.optimizer_def,
    init_fn=model.get_initial_variables,
    input_shapes=SHAPES,
    partitioner=partitioner,
  )
  first = initializer.from_scratch(jax.random.PRNGKey(0))
  trained, _ = train_two_steps(
    model,
    jax.tree.map(jnp.copy, first),
    partitioner,
    initializer.train_state_axes,
    [make_batch(8)] * 2,
  )
  manager = utils.create_orbax_checkpoint_manager(
    save_cfg=utils.SaveCheckpointConfig(checkpointer_cls=checkpointer_cls),
    train_state=first,
    partitioner=partitioner,
    model_dir=str(tmp_path),
  )
  assert manager.save(trained)
  manager.close()
  cfg = utils.RestoreCheckpointConfig(path=str(tmp_path), mode="latest")
  restored = initializer.from_checkpoint([cfg])
  jax.tree.map(np.testing.assert_array_equal, restored, trained)
  assert int(restored.step) == 2
  return first.params, restored.params


class PromptedTransformer(network.Transformer):
  """T5 whose encoder's input is multiplied by a learned prompt, the only parameter that is trained."""

  def setup(self):
    super().setup()
    self.prompt = Prompt()

  def encode(self, encoder_input_tokens, *args, **kwargs):
    return super().encode(encoder_input_tokens, *args, **kwargs) * self.prompt()[None]


class Prompt(nn.Module):
  @nn.compact
  def __call__(self):
    make = flax_partitioning.param_with_axes
    return make("prompt", nn.initializers.ones, (10, 16), jnp.float32, axes=("prompt", "embed"))


class PartOptimizer(optimizers.OptimizerDef):
  """Trains the parameters that a traversal visits, as prompt tuning does, with one optimizer."""

  def __init__(self, traversal, inner):
    super().__init__([inner.hyper_params])
    self.traversal, self.inner = traversal, inner

  def part(self, tree):
    flat = {"/".join(k): v for k, v in traverse_util.flatten_dict(unfreeze(tree)).items()}
    visited = self.traversal.iterate(traverse_util.unflatten_dict({(k,): k for k in flat}))
    return traverse_util.unflatten_dict({tuple(p.split("/")): flat[p] for p in visited})

  def merged(self, tree, part):
    flat = dict(traverse_util.flatten_dict(unfreeze(tree)))
    return traverse_util.unflatten_dict({**flat, **traverse_util.flatten_dict(unfreeze(part))})

  def init_state(self, params):
    nothing = jax.tree.map(lambda _: None, params)
    states = self.inner.init_state(self.part(params)).param_states
    return optimizers.OptimizerState(jnp.asarray(0, jnp.int32), self.merged(nothing, states))

  def apply_gradient(self, hyper_params, params, state, grads):
    before = optimizers.OptimizerState(state.step, self.part(state.param_states))
    new, after = self.inner.apply_gradient(
      hyper_params[0], self.part(params), before, self.part(grads)
    )
    states = self.merged(state.param_states, after.param_states)
    return self.merged(params, new), optimizers.OptimizerState(state.step + 1, states)

  def update_hyper_params(self, **overrides):
    return [each.replace(**overrides) for each in self.hyper_params]

  def set_param_axes(self, param_logical_axes):
    self.inner.set_param_axes(self.part(param_logical_axes))

  def derive_logical_axes(self, optimizer, param_logical_axes):
    axes = self.part(param_logical_axes)
    states = optimizers.OptimizerState(None, self.part(optimizer.state.param_states))
    derived = self.inner.derive_logical_axes(optimizers.Optimizer(self.inner, states, axes), axes)
    nothing = jax.tree.map(lambda _: None, optimizer.state.param_states)
    states = self.merged(nothing, derived.state.param_states)
    return optimizers.Optimizer(
      optimizer.optimizer_def, optimizers.OptimizerState(None, states), param_logical_axes
    )


class PromptCheckpointer(checkpoints.Checkpointer):
  """Saves the parameters whose names match as numpy files too."""

  def __init__(self, *args, save_paths, **kwargs):
    super().__init__(*args, **kwargs)
    self.save_paths = save_paths

  def save(self, state: train_state.TrainState, state_transformation_fns=(), **kwargs):
    folder = pathlib.Path(self.checkpoints_dir) / "numpy_checkpoints"
    folder.mkdir()
    for name, value in utils.flatten_dict_string_keys(state.params).items():
      if re.fullmatch(self.save_paths, name):
        np.save(folder / name.replace("/", "."), np.asarray(value))
    super().save(state, state_transformation_fns, **kwargs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Traversal. will be deprecated:DeprecationWarning")
def test_prompt_tuning_trains_the_prompt_alone_and_saves_it_as_numpy(tmp_path):
  rules = freeze({**adafactor.standard_logical_factor_rules(), "prompt": adafactor.FactorDim.NONE})
  only_prompt = traverse_util.ModelParamTraversal(lambda path, _: path.endswith("/prompt"))
  model = make_model(PromptedTransformer(T5_1_1))
  model.optimizer_def = PartOptimizer(
    only_prompt, adafactor.Adafactor(decay_rate=0.8, logical_factor_rules=rules)
  )
  partitioner = partitioning.PjitPartitioner(
    num_partitions=2,
    logical_axis_rules=partitioning.standard_logical_axis_rules(
      additional_rules=(("prompt", None),)
    ),
  )
  first, last = train_and_restore(
    model, partitioner, tmp_path, functools.partial(PromptCheckpointer, save_paths=".*/prompt")
  )
  changed = {
    name
    for name, value in utils.flatten_dict_string_keys(last).items()
    if not np.array_equal(value, utils.flatten_dict_string_keys(first)[name])
  }
  assert changed == {"prompt/prompt"}
  saved = np.load(tmp_path / "numpy_checkpoints" / "prompt.prompt.npy")
  np.testing.assert_array_equal(saved, last["prompt"]["prompt"])


class RemappedDense(nn.Module):
  """A dense layer in the manner of flaxformer: axes, a constraint, and a kernel stored as 3D."""

  features: int

  @nn.compact
  def __call__(self, x):
    kernel = flax_partitioning.param_with_axes(
      "kernel", nn.initializers.lecun_normal(), (x.shape[-1], 2, self.features // 2),
      jnp.float32, axes=("embed", "heads", "kv"),
    )  # fmt: skip
    x = flax_partitioning.with_sharding_constraint(x, ("batch", "length", "embed"))
    return jnp.einsum("...d,dhk->...hk", x, kernel).reshape(*x.shape[:-1], self.features)


class TwoTowers(nn.Module):
  """Two towers and an affinity between them, in the manner of T5X Retrieval."""

  @nn.compact
  def __call__(self, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens, **options):
    embed = layers.Embed(32, 16, name="token_embedder")
    left, right = (
      RemappedDense(16, name=side)(embed(tokens))
      for side, tokens in (("left", encoder_input_tokens), ("right", decoder_input_tokens))
    )
    affinity = flax_partitioning.param_with_axes(
      "affinity", nn.initializers.normal(0.1), (16, 32), jnp.float32, axes=("embed", "affinity")
    )
    return (left.mean(axis=1, keepdims=True) + right) @ affinity


@pytest.mark.slow
def test_modules_with_axes_of_their_own_are_split_by_additional_rules(tmp_path):
  rules = unfreeze(freeze(adafactor.standard_logical_factor_rules()))
  rules["affinity"] = adafactor.FactorDim.COLUMN
  model = make_model(TwoTowers())
  model.optimizer_def = adafactor.Adafactor(logical_factor_rules=freeze(rules))
  partitioner = partitioning.PjitPartitioner(
    num_partitions=2,
    logical_axis_rules=partitioning.standard_logical_axis_rules(
      additional_rules=(("affinity", "model"),)
    ),
  )
  first, last = train_and_restore(model, partitioner, tmp_path)
  assert last["affinity"].sharding.spec == partitioning.PartitionSpec(None, "model")
  assert last["left"]["kernel"].addressable_shards[0].data.shape == (16, 1, 8)
  assert not np.array_equal(first["affinity"], last["affinity"])
