"""Networks whose layers have experts: parameters, routing, losses and metrics, devices, decoding."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scalable_trees import scalable
from tiny_models import (
  DECODER_ONLY,
  T5_1_1,
  assert_close,
  decoder_only_variables,
  logits_of,
  make_batch,
  make_decoder_only_model,
  make_model,
  make_state,
  variables,
)

from rosetta_t5.networks.transformer import T5Config, Transformer
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.parallel.axis_rules import partition_specs_of

KEY = jax.random.PRNGKey(0)
# One layer on each side, with experts.
EXPERTS = dataclasses.replace(T5_1_1, num_experts=4, expert_layer_period=1, router_jitter=0.0)
# Two layers on each side, the second with experts.
EVERY_SECOND = dataclasses.replace(
  EXPERTS, num_encoder_layers=2, num_decoder_layers=2, expert_layer_period=2
)
MODEL = {"z_loss": 1e-3, "aux_loss_factor": 0.1, "router_z_loss_factor": 0.01}


def model_of(config=EXPERTS, **changes):
  return make_model(Transformer(dataclasses.replace(config, **changes)), **MODEL)


def sown(config=EXPERTS, batch=None):
  """Returns what the layers sow, {(layer, name): value}, without dropout."""
  _, tree = jax.jit(lambda p, b: model_of(config).score_batch(p, b, return_intermediates=True))(
    variables(Transformer(EXPERTS))["params"], batch or make_batch()
  )
  return {
    (side, name): float(values[0])
    for side in ("encoder", "decoder")
    for name, values in tree[side]["layers_0"]["mlp"].items()
    if not values[0].ndim
  }


def test_every_second_layer_has_experts_under_the_names_of_t5x():
  params = variables(Transformer(EVERY_SECOND))["params"]
  for side in ("encoder", "decoder"):
    assert set(params[side]["layers_0"]["mlp"]) == {"wi_0", "wi_1", "wo"}
    experts = params[side]["layers_1"]["mlp"]
    assert experts["expert"]["wi_0"]["kernel"].shape == (4, 16, 24)
    assert experts["expert"]["wo"]["kernel"].shape == (4, 24, 16)
    assert experts["router"]["router_weights"]["w"]["kernel"].shape == (16, 4)


@pytest.mark.slow
def test_experts_have_different_initial_values():
  shape = jnp.ones((1, 4), jnp.int32)
  params = jax.jit(Transformer(EXPERTS).init)(KEY, shape, shape, shape)["params"]
  kernel = params["encoder"]["layers_0"]["mlp"]["expert"]["wo"]["kernel"]
  assert not np.allclose(kernel[0], kernel[1])


@pytest.mark.one_quick_variant
@pytest.mark.parametrize(
  ("changes", "layers"),
  [
    ({}, {"encoder": (1,), "decoder": (1,)}),
    ({"expert_layer_period": 1}, {"encoder": (0, 1), "decoder": (0, 1)}),
    ({"decoder_expert_layer_period": 1}, {"encoder": (1,), "decoder": (0, 1)}),
    ({"expert_layer_offset": 0}, {"encoder": (0,), "decoder": (0,)}),
    ({"num_experts": 0}, {"encoder": (), "decoder": ()}),
  ],
)
def test_periods_choose_the_layers_that_have_experts(changes, layers):
  module = Transformer(dataclasses.replace(EVERY_SECOND, **changes))
  shape = jnp.ones((1, 4), jnp.int32)
  params = jax.eval_shape(module.init, KEY, shape, shape, shape)["params"]
  for side, expected in layers.items():
    found = [n for n in (0, 1) if "router" in params[side][f"layers_{n}"]["mlp"]]
    assert tuple(found) == expected


@pytest.mark.slow
def test_identical_experts_with_weights_that_add_up_to_1_compute_the_dense_network():
  without_experts = Transformer(dataclasses.replace(EXPERTS, num_experts=0))
  dense, batch = variables(without_experts)["params"], make_batch()
  want = jax.jit(lambda p: logits_of(without_experts, p, batch))(dense)
  for router in ("switch", "expert_choice"):
    module = Transformer(
      dataclasses.replace(EXPERTS, router=router, normalize_expert_weights=True, expert_capacity=10)
    )
    params = jax.tree.map(jnp.copy, dense)
    for side in ("encoder", "decoder"):
      block = params[side]["layers_0"]["mlp"]
      expert = jax.tree.map(lambda x: jnp.stack([x] * 4), block)
      kernel = jnp.asarray(np.random.default_rng(0).normal(size=(16, 4)), jnp.float32)
      router_params = {"router_weights": {"w": {"kernel": kernel}}}
      params[side]["layers_0"]["mlp"] = {"expert": expert, "router": router_params}
    real = np.asarray(batch["decoder_target_tokens"]) > 0
    got = jax.jit(lambda p, m=module: logits_of(m, p, batch))(params)
    np.testing.assert_allclose(got[real], want[real], rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_one_slot_per_row_leaves_tokens_behind():
  module = Transformer(dataclasses.replace(EXPERTS, expert_capacity=1))
  assert sown(module.config)["encoder", "fraction_tokens_left_behind"] > 0.3


@pytest.mark.slow
def test_capacity_is_that_of_training_with_dropout_and_of_evaluation_without():
  config = dataclasses.replace(EXPERTS, capacity_factor=0.5, eval_capacity_factor=4.0)
  model = make_model(Transformer(config))
  params = variables(Transformer(config))["params"]
  name = "experts/fraction_tokens_left_behind"
  train, evaluation = (
    float(jax.jit(lambda p, k=key: model.loss_fn(p, make_batch(), k)[1][name].compute())(params))
    for key in (KEY, None)
  )
  assert evaluation == 0 < train


@pytest.mark.slow
def test_padding_has_no_expert_unless_that_is_set():
  batch = make_batch()
  more = {name: jnp.pad(x, ((0, 0), (0, 3))) for name, x in batch.items()}
  config = dataclasses.replace(EXPERTS, expert_capacity=4)
  want = sown(config)
  assert sown(config, more) == pytest.approx(want, rel=1e-5)
  routed = sown(dataclasses.replace(config, route_padding=True), more)
  assert routed["encoder", "auxiliary_loss"] != pytest.approx(want["encoder", "auxiliary_loss"])


@pytest.mark.slow
def test_decoders_let_tokens_choose_two_experts_if_experts_choose_tokens_in_the_encoder():
  chosen, top_2 = (
    sown(dataclasses.replace(EXPERTS, router=router)) for router in ("expert_choice", "top_2")
  )
  assert chosen["encoder", "auxiliary_loss"] == 0
  assert chosen["encoder", "expert_usage"] != top_2["encoder", "expert_usage"]
  # The decoder's inputs differ, but all of its tokens may have two experts.
  assert chosen["decoder", "auxiliary_loss"] > 0


def test_the_loss_and_its_metrics_are_t5x_s():
  plain = make_model(Transformer(EXPERTS), z_loss=1e-3)
  params = variables(Transformer(EXPERTS))["params"]
  (loss, metrics), (base, _) = (
    jax.jit(m.eval_fn)(params, make_batch()) for m in (model_of(), plain)
  )
  value = {
    name: float(metric.compute()) for name, metric in metrics.items() if "timing" not in name
  }
  of_layers = sown()
  mean = {
    name: np.mean([value for (_, key), value in of_layers.items() if key == name])
    for name in ("auxiliary_loss", "router_z_loss", "expert_usage", "router_confidence")
  }
  assert float(loss) == pytest.approx(
    float(base) + 0.1 * mean["auxiliary_loss"] + 0.01 * mean["router_z_loss"], rel=1e-6
  )
  assert value["experts/auxiliary_loss"] == pytest.approx(0.1 * mean["auxiliary_loss"])
  assert value["experts/router_z_loss"] == pytest.approx(0.01 * mean["router_z_loss"])
  for name in ("expert_usage", "router_confidence"):
    assert value[f"experts/{name}"] == pytest.approx(mean[name])
  rest = value["z_loss"] + value["experts/auxiliary_loss"] + value["experts/router_z_loss"]
  assert value["cross_ent_loss"] == pytest.approx(float(loss) - rest, rel=1e-5)
  loads = [name for name in value if name.startswith("experts/highest_load/")]
  assert sorted(loads) == [f"experts/highest_load/{s}/layers_0" for s in ("decoder", "encoder")]


@pytest.mark.slow
def test_the_loss_computed_in_chunks_is_the_same():
  params = variables(Transformer(EXPERTS))["params"]
  chunked = make_model(Transformer(EXPERTS), loss_chunk_length=2, **MODEL)
  whole, parts = (jax.jit(m.eval_fn)(params, make_batch()) for m in (model_of(), chunked))
  np.testing.assert_allclose(parts[0], whole[0], rtol=1e-6)
  assert parts[1].keys() == whole[1].keys()


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, 1e4], ids=["collapsed", "saturated"])
def test_a_collapsed_router_shows_in_the_metrics_and_gives_no_nan(scale):
  model = model_of(router_jitter=0.01, capacity_factor=1.0)
  params = jax.tree_util.tree_map_with_path(
    lambda path, x: scale * x if "router" in str(path) else x,
    variables(Transformer(EXPERTS))["params"],
  )
  step = jax.jit(jax.value_and_grad(model.loss_fn, has_aux=True))
  (loss, metrics), grads = step(params, make_batch(), KEY)
  assert all(jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves((loss, grads)))
  if scale == 0:
    # Equal logits choose the first of four experts, which has three slots for ten inputs, two for six targets.
    value = {name: float(metric.compute()) for name, metric in metrics.items() if "exp" in name}
    assert value["experts/highest_load/encoder/layers_0"] == 4
    assert value["experts/router_confidence"] == 0.25
    assert value["experts/expert_usage"] == 0.25
    assert 0.3 < value["experts/fraction_tokens_left_behind"] < 0.7


@pytest.mark.slow
def test_groups_of_several_rows_share_the_slots():
  rows = {name: jnp.concatenate([x[:1]] * 8) for name, x in make_batch().items()}
  config = dataclasses.replace(EXPERTS, expert_capacity=3, router_group_size=20)
  alone = sown(dataclasses.replace(config, router_group_size=None), rows)
  # Two equal rows fill the slots that one row could have had for itself.
  key = ("encoder", "fraction_tokens_left_behind")
  assert sown(config, rows)[key] > alone[key]


@pytest.mark.slow
def test_scanned_layers_sow_a_load_for_each_layer():
  config = scalable(dataclasses.replace(EVERY_SECOND, num_encoder_layers=4), scan_layers=True)
  module = Transformer(config)
  _, metrics = jax.eval_shape(make_model(module).eval_fn, variables(module)["params"], make_batch())
  loads = {name.rpartition("highest_load/")[2] for name in metrics if "highest_load" in name}
  assert loads == {"encoder/layers_1", "encoder/layers_3", "decoder/layers_1"}


@pytest.mark.slow
def test_scanned_periods_of_layers_compute_the_same_as_layers_one_after_another():
  plain = dataclasses.replace(EVERY_SECOND, num_encoder_layers=4)
  configs = [scalable(plain, scan_layers=scan, remat_policy="full") for scan in (False, True)]
  one_by_one, scanned = map(Transformer, configs)
  params = variables(one_by_one)["params"]
  stacked = {"token_embedder": params["token_embedder"]}
  for side, layers in (("encoder", 4), ("decoder", 2)):
    rest = {name: x for name, x in params[side].items() if not name.startswith("layers_")}
    period = {
      f"layers_{first}": jax.tree.map(
        lambda *x: jnp.stack(x, 1), *(params[side][f"layers_{n}"] for n in range(first, layers, 2))
      )
      for first in (0, 1)
    }
    stacked[side] = {**rest, side: period}
  batch = make_batch()
  want = jax.jit(lambda p: logits_of(one_by_one, p, batch))(params)
  np.testing.assert_allclose(
    jax.jit(lambda p: logits_of(scanned, p, batch))(stacked), want, rtol=1e-4, atol=1e-4
  )


MESHES = {
  "expert, data": {"expert": 4, "data": 2},
  "expert, data, fsdp": {"expert": 2, "data": 2, "fsdp": 2},
  "expert, tensor": {"expert": 4, "tensor": 2},
  "expert, context": {"expert": 2, "data": 2, "context": 2},
  "data": {"data": 8},
}


def step_on(mesh):
  """Returns (compiled program's text, (loss, gradients)) on a mesh, or on one device."""
  model, state = model_of(), make_state(Transformer(EXPERTS))

  def step(params, batch):
    (loss, _), grads = jax.value_and_grad(model.loss_fn, has_aux=True)(params, batch, None)
    return loss, grads

  arguments = (state.params, make_batch())
  if mesh is None:
    compiled = jax.jit(step).lower(*arguments).compile()
    return compiled.as_text(), jax.device_get(compiled(*arguments))
  partitioner = PjitPartitioner(mesh=mesh)
  axes = partitioner.get_mesh_axes(state).params
  step = partitioner.partition(step, (axes, partitioner.data_partition_spec), (None, axes))
  return step.lower(*arguments).compile().as_text(), jax.device_get(step(*arguments))


@pytest.fixture(scope="module")
def one_device():
  return step_on(None)[1]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MESHES["expert, data, fsdp"]])
def test_experts_on_several_devices_give_the_loss_of_one_device(mesh, one_device):
  text, got = step_on(mesh)
  np.testing.assert_allclose(got[0], one_device[0], rtol=1e-5)
  assert_close(got, one_device, 5e-5)
  # Each of the two layers sends its tokens and receives them, forward and backward.
  assert len(re.findall(r"= .* all-to-all\(", text)) == 8


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_experts_on_every_mesh_give_the_loss_of_one_device(mesh, one_device):
  text, got = step_on(mesh)
  np.testing.assert_allclose(got[0], one_device[0], rtol=1e-5)
  assert_close(got, one_device, 5e-5)
  assert len(re.findall(r"= .* all-to-all\(", text)) == (8 if "expert" in mesh else 0)
  if not {"fsdp", "context"} & mesh.keys():
    assert "all-gather(" not in text  # only tokens move, and only to their experts


def test_experts_that_devices_do_not_divide_are_refused_by_name():
  state = make_state(Transformer(dataclasses.replace(EXPERTS, num_experts=3)))
  text = r"over expert into 4 parts, because 3 is not a multiple of 4.*NUM_EXPERT_PARTITIONS"
  with pytest.raises(ValueError, match=text):
    partition_specs_of(PjitPartitioner(mesh={"expert": 4}), state)


def test_moments_of_experts_are_split_like_the_experts():
  state = make_state(Transformer(EXPERTS))
  specs = PjitPartitioner(mesh={"expert": 4}).get_mesh_axes(state)
  moments = specs.param_states["encoder"]["layers_0"]["mlp"]["expert"]["wo"]["kernel"]
  assert moments.v_row[0] == moments.v_col[0] == "expert"
  assert specs.params["encoder"]["layers_0"]["mlp"]["expert"]["wo"]["kernel"][0] == "expert"


@pytest.mark.slow
@pytest.mark.parametrize("router", [pytest.param("switch", marks=pytest.mark.slow), "top_2"])
def test_decoding_continues_as_the_decoder_predicts(router):
  config = dataclasses.replace(EXPERTS, router=router, eval_capacity_factor=4.0)
  model = make_model(Transformer(config))
  params = variables(Transformer(config))["params"]
  batch = make_batch(batch_size=2)
  decodes = jax.jit(lambda p: model.predict_batch(p, batch))(params)
  inputs = jnp.pad(decodes, ((0, 0), (1, 0)))[:, :-1]
  targets = jnp.ones_like(decodes)
  full = {**batch, "decoder_input_tokens": inputs, "decoder_target_tokens": targets}
  logits = jax.jit(lambda p: logits_of(Transformer(config), p, full))(params)
  length = int(jnp.argmax(decodes[0] == 0)) or decodes.shape[1]
  np.testing.assert_array_equal(jnp.argmax(logits[0, : length - 1], -1), decodes[0, : length - 1])


@pytest.mark.slow
def test_a_decoder_with_experts_has_their_losses():
  config = dataclasses.replace(DECODER_ONLY, num_experts=2, use_bias=True)
  model = make_decoder_only_model(config, aux_loss_factor=0.1)
  tokens = make_batch()["decoder_target_tokens"]
  batch = {"decoder_input_tokens": tokens, "decoder_target_tokens": tokens}
  _, metrics = jax.jit(model.eval_fn)(decoder_only_variables(config)["params"], batch)
  assert metrics["experts/auxiliary_loss"].total > 0
  assert "experts/highest_load/decoder/layers_1" in metrics


def test_the_router_is_float32_under_bfloat16():
  config = dataclasses.replace(EXPERTS, dtype="bfloat16")
  params, batch = variables(Transformer(EXPERTS))["params"], make_batch()
  program = str(jax.make_jaxpr(lambda p: logits_of(Transformer(config), p, batch))(params))
  # The logits of 4 experts for 80 inputs and 48 targets.
  assert set(re.findall(r"(\w+)\[(?:80|48),4\] = dot_general", program)) == {"f32"}


@pytest.mark.parametrize(
  ("changes", "text"),
  [
    ({"router": "top2"}, "T5Config.router must be one of 'switch', 'top_2', 'expert_choice'"),
    ({"num_experts": 1, "router": "top_2"}, "T5Config.router = 'top_2' needs at least 2 experts"),
    # A decoder would use 'top_2'.
    ({"num_experts": 1, "router": "expert_choice"}, "'expert_choice' needs at least 2 experts"),
  ],
)
def test_settings_that_experts_cannot_have_are_refused(changes, text):
  with pytest.raises(ValueError, match=re.escape(text)):
    T5Config(vocab_size=8, **{"num_experts": 4, **changes})


def test_experts_cannot_choose_tokens_in_a_decoder():
  with pytest.raises(ValueError, match="router must be 'switch' or 'top_2' in a decoder"):
    dataclasses.replace(DECODER_ONLY, num_experts=4, router="expert_choice")


@pytest.mark.slow
def test_a_group_smaller_than_a_row_is_refused():
  config = dataclasses.replace(EXPERTS, router_group_size=4)
  with pytest.raises(
    ValueError, match=r"router_group_size of .* must be at least the length of a row, 10"
  ):
    logits_of(Transformer(config), variables(Transformer(EXPERTS))["params"], make_batch())


def test_factors_of_losses_that_do_not_exist_are_refused():
  with pytest.raises(
    ValueError, match=r"aux_loss_factor = 0.1 and .* no layer of the network has exp"
  ):
    make_model(Transformer(T5_1_1), aux_loss_factor=0.1)
