"""A pipeline computes the same numbers as one device: losses, gradients, dropout."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax.flatten_util import ravel_pytree
from planned_work import planned_work
from scalable_trees import scalable
from tiny_models import (
  GPT,
  T5_1_1,
  assert_close,
  create_state,
  make_batch,
  make_decoder_only_model,
  make_model,
)

from rosetta_t5.networks.layers.dropout import bernoulli_of_rows
from rosetta_t5.networks.layers.matmuls import KFAC_FACTORS
from rosetta_t5.networks.layers.stack import pipeline_obstacle
from rosetta_t5.networks.precision import TransformerEngineConfig, choose_fp8, with_fp8
from rosetta_t5.networks.transformer import Transformer
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.parallel.axis_rules import check_partition_specs
from rosetta_t5.parallel.pipeline import (
  Pipeline,
  PipelineSchedule,
  StageInput,
  choose_schedule,
)
from rosetta_t5.parallel.placement import PipelineSettings
from rosetta_t5.plan.collectives import step_collectives
from rosetta_t5.training.step import accumulate_gradients

KEY = jax.random.PRNGKey(3)
LAYERS = 4
CONFIGS = {
  "GPT": GPT.replace(num_layers=LAYERS, scan_layers=True, dropout_rate=0.2),
  "rotary": GPT.replace(
    num_layers=LAYERS,
    scan_layers=True,
    dropout_rate=0.2,
    positions="rotary",
    mlp_activations=("gelu", "linear"),
    norm="rms",
  ),
  "T5": scalable(
    T5_1_1, num_encoder_layers=LAYERS, num_decoder_layers=LAYERS // 2, dropout_rate=0.2
  ),
}


def model_of(family, fp8=False, **changes):
  config = CONFIGS[family].replace(**changes)
  make = (lambda c: make_model(Transformer(c))) if family == "T5" else make_decoder_only_model
  choice = choose_fp8(TransformerEngineConfig(enabled=fp8, emulate=True))
  return with_fp8(make(config), choice)


@functools.cache
def batch_of(family, packed):
  batch = make_batch(16, 8, 8)
  if packed:
    # Two examples in each row.
    segments = jnp.broadcast_to(1 + jnp.arange(8) // 4, (16, 8)).astype(jnp.int32)
    for side, tokens in (("encoder", "input"), ("decoder", "target")):
      real = batch[f"{side}_{tokens}_tokens"] > 0
      batch[f"{side}_segment_ids"] = segments * real
      batch[f"{side}_positions"] = jnp.broadcast_to(jnp.arange(8) % 4, (16, 8)) * real
  keep = ("encoder", "decoder") if family == "T5" else ("decoder",)
  return {name: x for name, x in batch.items() if name.startswith(keep)}


@functools.cache
def state_of(family):
  model = model_of(family)
  shapes = dict.fromkeys(batch_of(family, False), (1, 8))
  variables = jax.jit(lambda key: model.get_initial_variables(key, shapes))(jax.random.PRNGKey(0))
  return create_state(variables)


def numbers(
  family, mesh=None, microbatches=1, dropout=True, packed=False, settings=None, fp8=False, **changes
):
  """Returns (loss, gradients) of a batch."""
  model, state = model_of(family, fp8, **changes), state_of(family)

  def run(params, batch):
    grads, loss, _, _ = accumulate_gradients(
      lambda params, batch, key: model.loss_fn(params, batch, key if dropout else None),
      state.replace(params=params),
      batch,
      KEY,
      microbatches,
    )
    return loss, grads

  batch = batch_of(family, packed)
  if mesh is None:
    return jax.device_get(jax.jit(run)(state.params, batch))
  partitioner = PjitPartitioner(mesh=mesh, **(settings or {}))
  axes = partitioner.get_mesh_axes(state).params
  compiled = partitioner.partition(run, (axes, partitioner.data_partition_spec), (None, axes))
  return jax.device_get(compiled(state.params, batch))


def check(family, mesh, tolerance=1e-5, settings=None, **options):
  want = numbers(family, **options)
  assert_close(numbers(family, mesh, settings=settings, **options), want, tolerance)


WITH_DROPOUT = {
  "GPT, two rounds, data": ("GPT", {"pipeline": 2, "data": 4}, {"pipeline_rounds": 2}),
  "T5, fsdp and tensor": ("T5", {"pipeline": 2, "fsdp": 2, "tensor": 2}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
  "case",
  [pytest.param(c, marks=[pytest.mark.slow] * c.startswith("T5")) for c in WITH_DROPOUT],
)
def test_losses_and_gradients_with_dropout_equal_those_of_one_device(case):
  family, mesh, settings = WITH_DROPOUT[case]
  check(family, mesh, settings=settings)


MESHES = [
  {"pipeline": 4, "data": 2},
  {"pipeline": 4, "tensor": 2},
  {"pipeline": 2, "data": 2, "tensor": 2},
  {"pipeline": 2, "fsdp": 4},
]
SWITCHES = {
  "microbatches": {"microbatches": 2},
  "packed": {"packed": True},
  "no dropout": {"dropout": False},
  "full": {"remat_policy": "full"},
  "minimal": {"remat_policy": "minimal"},
  "length first": {"transpose_batch_sequence": True},
  "fused": {"fuse_qkv_params": True},
  "flash": {"attention_kernel": "flash"},
}
# Every switch and every mesh with every family, but not every combination.
TABLE = [
  (family, mesh, switch)
  for number, family in enumerate(CONFIGS)
  for n, switch in enumerate(SWITCHES)
  for mesh in [MESHES[(n + number) % len(MESHES)]]
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh", "switch"), TABLE)
def test_switches_equal_one_device(family, mesh, switch):
  if family == "T5" and mesh["pipeline"] == 4:
    mesh = mesh | {"pipeline": 2, "data": mesh.get("data", 1) * 2}
  check(family, mesh, **SWITCHES[switch])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["GPT", "T5"])
def test_split_positions_equal_one_device(family):
  check(family, {"pipeline": 2, "data": 2, "context": 2}, attention_kernel="flash")


@pytest.mark.slow
@pytest.mark.parametrize(("microbatches", "rounds"), [(2, 1), (4, 2), (8, 1)])
def test_all_schedules_equal_one_device(microbatches, rounds):
  settings = {"pipeline_microbatches": microbatches, "pipeline_rounds": rounds}
  check("GPT", {"pipeline": 2, "data": 2, "tensor": 2}, settings=settings)


@pytest.mark.slow
def test_bfloat16_equals_one_device_as_far_as_it_is_precise():
  check("GPT", {"pipeline": 4, "data": 2}, 0.05, dtype=jnp.bfloat16)


@pytest.mark.slow
def test_fp8_differs_from_one_device_by_the_rounding_of_units_only():
  # Each microbatch is scaled by its own maximum.
  options = {"dtype": jnp.bfloat16, "fp8": True}
  want, got = (numbers("GPT", mesh, **options) for mesh in (None, {"pipeline": 4, "data": 2}))
  assert got[0] == pytest.approx(want[0], rel=2e-3)
  want_grads, got_grads = (ravel_pytree(grads)[0] for grads in (want[1], got[1]))
  assert np.linalg.norm(got_grads - want_grads) < 0.1 * np.linalg.norm(want_grads)


@pytest.mark.slow
@pytest.mark.parametrize("make_key", [jax.random.PRNGKey, jax.random.key])
def test_rows_of_a_random_array_are_those_of_the_whole_array(make_key):
  key, shape, rows = make_key(5), (3, 8, 1, 5), jnp.array([6, 1, 2])
  whole = jax.random.bernoulli(key, 0.3, shape)
  np.testing.assert_array_equal(bernoulli_of_rows(key, 0.3, shape, 1, rows), whole[:, rows])
  np.testing.assert_array_equal(bernoulli_of_rows(key, 0.3, shape, -3, rows), whole[:, rows])


def test_rows_of_other_generators_are_random_too():
  key = jax.random.key(0, impl="unsafe_rbg")
  first, second = (bernoulli_of_rows(key, 0.3, (64, 99), 0, jnp.array([row])) for row in (3, 4))
  assert 0.1 < first.mean() < 0.5
  assert (first != second).any()


@pytest.mark.slow
@pytest.mark.parametrize(
  ("family", "mesh"),
  [("GPT", {"pipeline": 2, "data": 2}), ("T5", {"pipeline": 2, "fsdp": 2})],
)
def test_loops_contain_only_the_permutations_that_plan_counts(family, mesh):
  model, params, batch = model_of(family), state_of(family).params, batch_of(family, False)
  partitioner = PjitPartitioner(mesh=mesh).on_devices(jax.devices()[:4])
  axes = partitioner.get_mesh_axes(state_of(family)).params
  gradient = jax.grad(lambda params, batch: model.loss_fn(params, batch, None)[0])
  program = partitioner.partition(gradient, (axes, partitioner.data_partition_spec), axes)
  loops, main = program.lower(params, batch).compile().as_text().split("\nENTRY ")
  pattern = r"= (\w+)\[([\d,]*)\]\S* (all-\w+|reduce-scatter|collective-permute)\("
  in_loops = re.findall(pattern, loops)
  assert {kind for _, _, kind in in_loops} == {"collective-permute"}
  assert "all-reduce(" in main
  sizes = [
    {"f32": 4, "pred": 1}[dtype] * math.prod(int(n) for n in shape.split(","))
    for dtype, shape, _ in in_loops
  ]
  lengths = {"decoder": 8, "encoder": 8} if family == "T5" else {"decoder": 8}
  shape = partitioner.mesh.shape
  work = planned_work(model.network_config, lengths, 4, shape, partitioner)
  planned = [each.size for each in step_collectives(work) if each.kind == "collective-permute"]
  assert sum(planned) == pytest.approx(sum(sizes) * work.schedule.ticks, rel=0.1)


@pytest.mark.slow
def test_matmuls_of_split_positions_in_a_stage_need_no_sums():
  model = model_of("GPT", attention_kernel="flash")
  partitioner = PjitPartitioner(mesh={"pipeline": 2, "context": 2}).on_devices(jax.devices()[:4])
  axes = partitioner.get_mesh_axes(state_of("GPT")).params
  program = partitioner.partition(
    lambda params, batch: model.loss_fn(params, batch, None)[0],
    (axes, partitioner.data_partition_spec),
    None,
  )
  text = program.lower(state_of("GPT").params, batch_of("GPT", False)).compile().as_text()
  loops, _ = text.split("\nENTRY ")
  assert "all-gather(" in loops  # keys, values and kernels
  assert "all-reduce(" not in loops


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("rounds", [1, 2])
def test_the_backward_pass_keeps_one_copy_of_the_parameters_for_all_ticks(rounds):
  size, batch, layers = 128, 16, 4
  mesh = PjitPartitioner(mesh={"pipeline": 2}).on_devices(jax.devices()[:2]).mesh

  def apply_layers(stacked, rows, microbatch, shared):
    params, _ = stacked
    return jax.lax.scan(lambda x, p: (jnp.tanh(x @ p), None), microbatch.activations, params)[0]

  def loss(params, x):
    pipeline = Pipeline(PipelineSchedule(2, 8, rounds), apply_layers, batch, StageInput(0, ()))
    return jnp.sum(pipeline(params, None, StageInput(x, ()), ()))

  shapes = [
    jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("pipeline")))
    for shape in ((layers, size, size), (batch, size))
  ]
  with jax.set_mesh(mesh):
    memory = jax.jit(jax.grad(loss)).lower(*shapes).compile().memory_analysis()
  # A stage has half of the parameters. In nine or 17 ticks it keeps a copy and sums of gradients.
  assert memory.temp_size_in_bytes < 5 * (4 * size * size * layers // 2)


def test_stages_compute_groups_of_microbatches_in_rounds():
  schedule = PipelineSchedule(stages=2, microbatches=4, rounds=2)

  def computed(stage):
    """Returns (microbatch, round) of each tick; None in the bubble."""
    works = [schedule.work_at(tick, stage) for tick in range(schedule.ticks)]
    return [
      (int(2 * work.group + work.position), work.round) if work.is_computed else None
      for work in works
    ]

  first_stage = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
  assert computed(0) == [*first_stage, None]
  assert computed(1) == [None, *first_stage]


@pytest.mark.parametrize(("stages", "microbatches", "rounds"), [(3, 6, 2), (6, 12, 1), (4, 4, 3)])
def test_a_stage_computes_what_the_stage_before_it_has_sent(stages, microbatches, rounds):
  schedule = PipelineSchedule(stages, microbatches, rounds)
  for stage in range(1, stages):
    for tick in range(1, schedule.ticks):
      assert schedule.work_at(tick, stage) == schedule.work_at(tick - 1, stage - 1)
  # From the last stage a microbatch returns to the first one, for the next round.
  for tick in range(stages, microbatches * rounds):
    before, after = schedule.work_at(tick - 1, stages - 1), schedule.work_at(tick, 0)
    if after.round:
      assert after == before._replace(round=before.round + 1)


def test_the_bubble_is_the_share_of_ticks_without_work():
  schedule = PipelineSchedule(stages=4, microbatches=16, rounds=2)
  assert schedule.ticks == 35
  assert schedule.bubble == 3 / 35


@pytest.mark.parametrize(("stages", "rounds"), [(2, 2), (4, 2), (2, 4), (4, 3), (6, 4), (5, 1)])
def test_chunks_move_to_their_stages_in_permutations(stages, rounds):
  permutations = PipelineSchedule(stages, stages, rounds).chunk_permutations()
  assert len(permutations) == rounds
  for moves in permutations:
    assert [chunk // rounds for chunk, _ in moves] == list(range(stages))  # the senders
    assert sorted(target for _, target in moves) == list(range(stages))
    assert all(chunk % stages == target for chunk, target in moves)
  assert sorted(c for moves in permutations for c, _ in moves) == list(range(stages * rounds))


def test_by_default_there_are_up_to_four_microbatches_per_stage():
  mesh = {"pipeline": 4, "data": 2, "fsdp": 2, "model": 8}
  chosen = [
    choose_schedule(mesh, batch, 8, PipelineSettings()).microbatches for batch in (16, 48, 256)
  ]
  assert chosen == [4, 12, 16]


@pytest.mark.parametrize(
  ("batch", "layers", "settings", "message"),
  [
    (12, 8, PipelineSettings(), "needs a multiple of 8 examples in each pass, got 12"),
    (16, 6, PipelineSettings(), "6 layers cannot be split into the 4 stages .* divisor of 6"),
    (16, 8, PipelineSettings(rounds=3), "must divide the 2 layers of each device"),
    (16, 8, PipelineSettings(rounds=-1), "must divide the 2 layers .* got -1"),
    (32, 8, PipelineSettings(0), r"divides the 16 examples of a replica, got 0.*\[4, 8, 16\]"),
    (32, 8, PipelineSettings(6), r"4 stages that divides the 16 examples .* got 6.*\[4, 8, 16\]"),
  ],
)
def test_what_cannot_be_divided_is_an_error(batch, layers, settings, message):
  with pytest.raises(ValueError, match=message):
    choose_schedule({"pipeline": 4, "data": 2}, batch, layers, settings)


@pytest.mark.parametrize(
  ("changes", "collections", "message"),
  [
    ({"num_experts": 4}, (), "num_experts = 4 is not supported with a pipeline: set it to 0, or"),
    ({}, {KFAC_FACTORS}, "by_kfac cannot measure the layers of a pipeline: set"),
    ({}, {OVERWRITE_WITH_GRADIENT}, "recipe = 'delayed' is not supported with a pipeline: set it"),
  ],
)
def test_unsupported_models_are_refused_in_a_pipeline(changes, collections, message):
  assert message in pipeline_obstacle(CONFIGS["GPT"].replace(**changes), collections)


@pytest.mark.slow
def test_a_plan_refuses_experts_in_a_pipeline():
  config = CONFIGS["GPT"].replace(num_experts=4)
  with pytest.raises(ValueError, match="num_experts = 4 is not supported with a pipeline"):
    _ = planned_work(config, {"decoder": 8}, 8, {"pipeline": 2, "data": 1}).schedule


def test_intermediates_are_refused_in_a_pipeline():
  score = functools.partial(model_of("GPT").score_batch, return_intermediates=True)
  partitioner = PjitPartitioner(mesh={"pipeline": 2, "data": 4})
  with pytest.raises(ValueError, match="got the collections intermediates: call the model without"):
    partitioner.partition(score, (None, partitioner.data_partition_spec), None).lower(
      state_of("GPT").params, batch_of("GPT", False)
    )


def test_layers_that_are_not_stacked_are_an_error():
  kernel = jax.ShapeDtypeStruct((8, 8), jnp.float32)
  message = "a pipeline of 2 stages, but the layers are not stacked: set .*scan_layers = True"
  with pytest.raises(ValueError, match=message):
    check_partition_specs([kernel], [jax.sharding.PartitionSpec()], {"pipeline": 2})


def test_parameters_of_layers_are_split_over_stages():
  partitioner = PjitPartitioner(mesh={"pipeline": 4, "data": 2})
  specs = partitioner.get_mesh_axes(state_of("GPT")).params["decoder"]["decoder"]
  assert all("pipeline" in spec for spec in jax.tree.leaves(specs))


def test_a_process_reads_the_rows_of_its_stage():
  partitioner = PjitPartitioner(mesh={"pipeline": 2, "data": 4})
  spec = partitioner.data_partition_spec
  assert spec == jax.sharding.PartitionSpec(("pipeline", "data", "fsdp"))
  batch = jax.device_put(np.arange(8), jax.sharding.NamedSharding(partitioner.mesh, spec))
  rows = {shard.device.id: int(shard.data[0]) for shard in batch.addressable_shards}
  assert [rows[device.id] for device in partitioner.mesh.devices.flat] == list(range(8))
