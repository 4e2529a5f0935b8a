"""Models that compile in a moment: small T5 and decoder-only models, and a table of bigrams."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import unfreeze
from flax.linen.partitioning import param_with_axes

from rosetta_t5.models import DecoderOnlyModel, EncoderDecoderModel
from rosetta_t5.networks.transformer import DecoderWrapper, T5Config, Transformer, TransformerConfig
from rosetta_t5.training import TrainState
from rosetta_t5.training.optimizers.adafactor import Adafactor
from rosetta_t5.training.optimizers.factor_rules import standard_logical_factor_rules

VOCAB = 32

# Every dimension divides by 4, so that a mesh can split it.
T5_1_1 = T5Config(
  vocab_size=VOCAB,
  emb_dim=16,
  num_heads=4,
  num_encoder_layers=1,
  num_decoder_layers=1,
  head_dim=4,
  mlp_dim=24,
  mlp_activations=("gelu", "linear"),
  dropout_rate=0.0,
)
T5_1_0 = dataclasses.replace(T5_1_1, mlp_activations=("relu",), logits_via_embedding=True)

DECODER_ONLY = TransformerConfig(
  vocab_size=VOCAB,
  emb_dim=16,
  num_heads=4,
  num_layers=2,
  head_dim=4,
  mlp_dim=24,
  mlp_activations=("gelu", "linear"),
  dropout_rate=0.0,
)

GPT = DECODER_ONLY.replace(
  mlp_activations=("gelu",),
  logits_via_embedding=True,
  positions="learned",
  max_length=8,
  norm="layer",
  norm_epsilon=1e-5,
  use_bias=True,
  scale_queries=True,
  divide_tied_logits=False,
  init_stddev=0.1,
)

Batch = dict[str, jax.Array]


def make_batch(batch_size: int = 8, inputs: int = 10, targets: int = 6, seed: int = 0) -> Batch:
  """Returns random tokens, each row followed by at least one position of padding."""
  rng = np.random.default_rng(seed)

  def rows(length: int) -> np.ndarray:
    real = np.arange(length) < rng.integers(length // 2, length, (batch_size, 1))
    return np.where(real, rng.integers(2, VOCAB, (batch_size, length)), 0).astype(np.int32)

  return feature(rows(inputs), rows(targets))


def feature(inputs_BS: np.ndarray, targets_BT: np.ndarray) -> Batch:
  """Returns the batch that SeqIO's feature converter makes of unpacked inputs and targets."""
  return {
    "encoder_input_tokens": jnp.asarray(inputs_BS),
    "decoder_input_tokens": jnp.asarray(np.pad(targets_BT, ((0, 0), (1, 0)))[:, :-1]),
    "decoder_target_tokens": jnp.asarray(targets_BT),
    "decoder_loss_weights": jnp.asarray((targets_BT > 0).astype(np.int32)),
  }


def pack(batch: Batch) -> Batch:
  """Returns one row that contains all examples one after another, with segments and positions."""
  row = {}
  for side in ("encoder_input", "decoder_target"):
    tokens = np.asarray(batch[f"{side}_tokens"])
    real = [example[example > 0] for example in tokens]
    row[f"{side}_tokens"] = np.concatenate(real)
    lengths = [len(example) for example in real]
    name = side.split("_")[0]
    row[f"{name}_segment_ids"] = np.repeat(np.arange(len(real)) + 1, lengths)
    row[f"{name}_positions"] = np.concatenate([np.arange(length) for length in lengths])
  shifted = np.concatenate([[0], row["decoder_target_tokens"][:-1]])
  row["decoder_input_tokens"] = np.where(row["decoder_positions"] == 0, 0, shifted)
  row["decoder_loss_weights"] = np.ones_like(shifted)
  return {name: jnp.asarray(np.pad(array, (0, 2))[None], jnp.int32) for name, array in row.items()}


def adafactor() -> Adafactor:
  return Adafactor(logical_factor_rules=standard_logical_factor_rules())


def make_model(module: Any = None, **arguments: Any) -> EncoderDecoderModel:
  """Returns a model around `module`, T5 1.1 if none is given; token 1 ends its decodes."""
  vocabulary = types.SimpleNamespace(eos_id=1, vocab_size=VOCAB)
  return EncoderDecoderModel(
    module=Transformer(T5_1_1) if module is None else module,
    input_vocabulary=vocabulary,
    output_vocabulary=vocabulary,
    optimizer_def=adafactor(),
    feature_converter_cls=object,
    **arguments,
  )


def make_decoder_only_model(
  config: TransformerConfig = DECODER_ONLY, **arguments: Any
) -> DecoderOnlyModel:
  """Returns a decoder-only model; token 1 ends its decodes."""
  vocabulary = types.SimpleNamespace(eos_id=1, vocab_size=VOCAB)
  module = DecoderWrapper(config)
  return DecoderOnlyModel(
    module, vocabulary, adafactor(), feature_converter_cls=object, **arguments
  )


@functools.partial(jax.jit, static_argnums=0)
def initialize(module: nn.Module, key: jax.Array) -> Any:
  """Returns the module's own initial variables as plain dicts."""
  shapes = {"encoder_input_tokens": (1, 4), "decoder_input_tokens": (1, 4)}
  return unfreeze(make_model(module).get_initial_variables(key, input_shapes=shapes))


@functools.cache
def variables(module: nn.Module) -> Any:
  """Returns variables of the module's shapes, drawn by numpy so that nothing is compiled."""
  return _drawn(functools.partial(initialize, module))


@functools.cache
def decoder_only_variables(config: TransformerConfig) -> Any:
  """Returns variables of a decoder-only network, drawn in the same way."""
  tokens = jnp.ones((1, 4), jnp.int32)
  init = functools.partial(DecoderWrapper(config).init, enable_dropout=False)
  return _drawn(lambda key: init(key, tokens, tokens))


def decoder_only_params(config: TransformerConfig) -> Any:
  """Returns the parameters of `decoder_only_variables`."""
  return decoder_only_variables(config)["params"]


def _drawn(init: Callable[[jax.Array], Any]) -> Any:
  rng = np.random.default_rng(0)

  def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    values = (
      1.0 + rng.normal(size=leaf.shape) if leaf.ndim == 1 else rng.normal(size=leaf.shape) / 4
    )
    return jnp.asarray(values.astype(leaf.dtype))  # numpy casts without a program for each shape

  shapes = jax.eval_shape(init, jax.random.PRNGKey(0))
  return {**shapes, "params": jax.tree.map(draw, shapes["params"])}


def stacked(params: Any) -> Any:
  """Returns the parameters of a decoder-only network with its layers stacked, as a scan has them."""
  inner = dict(params["decoder"])
  layers = [inner.pop(f"layers_{n}") for n in range(2)]
  inner["decoder"] = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *layers)
  return {"decoder": inner}


def assert_close(got: Any, want: Any, tolerance: float) -> None:
  """Fails if the loss or a gradient differs by more than the tolerance.

  The difference of a gradient is relative to the largest value of its array, but at least to a hundredth
  of the largest of all. The gradient of a key's bias, for example, is only rounding, because softmax
  ignores what all logits have in common.
  """
  np.testing.assert_allclose(got[0], want[0], rtol=tolerance)
  least = 0.01 * max(np.abs(leaf).max() for leaf in jax.tree.leaves(want[1]))
  for path, leaf in jax.tree_util.tree_leaves_with_path(want[1]):
    mine = functools.reduce(lambda tree, key: tree[key.key], path, got[1])
    error = np.abs(mine - leaf).max() / max(np.abs(leaf).max(), least)
    assert error <= tolerance, f"{jax.tree_util.keystr(path)} is off by {error:.1e}"


def params_of(config: T5Config) -> Any:
  return variables(Transformer(config))["params"]


def exchange_padding(tokens: Any, pad_id: int) -> np.ndarray:
  """Returns tokens of which 0 and `pad_id` have exchanged their meanings."""
  return np.where(tokens == 0, pad_id, np.where(tokens == pad_id, 0, tokens))


def with_padding(params: Any, pad_id: int) -> Any:
  """Returns the parameters of a T5 1.1 for tokens of `exchange_padding`."""
  tokens = exchange_padding(np.arange(VOCAB), pad_id)
  exchanged = jax.tree.map(lambda leaf: leaf, params)  # a copy of the tree
  exchanged["token_embedder"]["embedding"] = params["token_embedder"]["embedding"][tokens]
  kernel_DV = params["decoder"]["logits_dense"]["kernel"]
  exchanged["decoder"]["logits_dense"]["kernel"] = kernel_DV[:, tokens]
  return exchanged


def logits_of(
  module: nn.Module, params: Any, batch: Batch, dropout_rng: jax.Array | None = None
) -> jax.Array:
  """Returns the logits of an encoder-decoder or decoder-only network."""
  sides = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
  tokens = [batch[name] for name in sides if name in batch]
  suffixes = ("_segment_ids", "_positions", "_causal_attention")
  return module.apply(
    {"params": params},
    *tokens,
    **{name: array for name, array in batch.items() if name.endswith(suffixes)},
    enable_dropout=dropout_rng is not None,
    rngs=None if dropout_rng is None else {"dropout": dropout_rng},
  )


def make_state(module: nn.Module) -> TrainState:
  """Returns a train state of step 0."""
  # Only shapes are read, because `jax.eval_shape` of this function has no values.
  zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), variables(module))
  return create_state({**zeros, "params": variables(module)["params"]})


@jax.jit
def create_state(variables: Any) -> TrainState:
  """Returns a train state of step 0 with these variables, made by one program."""
  return TrainState.create(adafactor(), variables)


class Bigram(nn.Module):
  """A model without a network: the logits are the row of a table that belongs to the previous token.

  Attributes:
    counts_calls: whether it has a mutable collection with the number of calls.
  """

  counts_calls: bool = False

  @nn.compact
  def __call__(
    self,
    encoder_input_tokens: jax.Array,
    decoder_input_tokens: jax.Array,
    decoder_target_tokens: jax.Array,
    **options: Any,
  ) -> jax.Array:
    table = param_with_axes(
      "table", nn.initializers.normal(), (VOCAB, VOCAB), jnp.float32, axes=("vocab", "embed")
    )
    if self.counts_calls:
      calls = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
      calls.value += 1
    return table[decoder_input_tokens]
