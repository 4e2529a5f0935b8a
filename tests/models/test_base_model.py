"""The interface that every model offers, including a user's."""

import flax.linen as nn
import pytest

from rosetta_t5.models import BaseModel, BaseTransformerModel


def make_concrete(base: type) -> type:
  """Returns a subclass that implements the abstract methods and does not call `base.__init__`."""
  methods = {name: lambda self: None for name in base.__abstractmethods__}
  return type("UsersModel", (base,), {**methods, "__init__": lambda self: None})


@pytest.mark.parametrize("base", [BaseModel, BaseTransformerModel])
def test_the_interface_has_defaults_for_a_model_that_does_not_call_our_init(base):
  model = make_concrete(base)()
  assert model.network_config is None
  assert model.loss_normalizing_factor is None
  assert model.loss_chunk_length is None


def test_the_network_config_is_that_of_the_linen_module():
  class Network(nn.Module):
    config: tuple

  model = make_concrete(BaseTransformerModel)()
  model.module = Network(config=(1, 2))
  assert model.network_config == (1, 2)
  model.module = nn.Dense(3)
  assert model.network_config is None


def test_the_private_attributes_that_t5x_subclasses_set_are_read():
  model = make_concrete(BaseTransformerModel)()
  model._loss_normalizing_factor = 8.0
  assert model.loss_normalizing_factor == 8.0
