"""The kernels, bytes, FLOPs, collectives and minimum time that are read from a GPU program."""

from __future__ import annotations

import pytest

from rosetta_t5.gpu_program.hlo import parse_program, short_source
from rosetta_t5.gpu_program.roofline import add_up, time_program
from rosetta_t5.telemetry.gpus import GPUS

GPU = GPUS["h200"]
MESH = {"data": 4, "model": 2}
CONTRACT_LAST = 'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
HEADER = "HloModule jit_step, is_scheduled=true\n"


def timeline(entry: str, others: str = "", mesh=MESH, **arguments):
  """Returns the timeline of a program whose entry computation has these lines."""
  text = f"{HEADER}{others}\nENTRY %main.1 (p: f32[8]) -> f32[8] {{\n{entry}\n}}\n"
  return time_program(parse_program(text), GPU, mesh, **arguments)


def test_a_matmul_counts_two_flops_per_multiplication_and_not_its_workspace():
  found = timeline(
    "  %a = bf16[8192,4096]{1,0} parameter(0)\n"
    "  %b = bf16[4096,1024]{1,0} parameter(1)\n"
    "  %m = (bf16[8192,1024]{1,0}, s8[4194304]{0}) custom-call(%a, %b), "
    f'custom_call_target="__cublas$lt$matmul", metadata={{op_name="x"}}, {CONTRACT_LAST}'
  )
  (timed,) = found.kernels
  assert timed.kind == "matmuls (cuBLASLt)"
  assert timed.flops == 2 * 8192 * 4096 * 1024
  assert timed.bytes == 2 * (8192 * 4096 + 4096 * 1024 + 8192 * 1024)
  assert (timed.bound, timed.seconds) == ("matmuls", timed.flops / 989e12)


def test_an_fp8_matmul_is_bound_by_the_peak_of_fp8():
  found = timeline(
    "  %a = f8e4m3fn[8192,4096]{1,0} parameter(0)\n"
    "  %b = f8e4m3fn[4096,4096]{1,0} parameter(1)\n"
    "  %m = (bf16[8192,4096]{1,0}, s8[4194304]{0}) custom-call(%a, %b), "
    f'custom_call_target="__cublas$lt$matmul$f8", {CONTRACT_LAST}'
  )
  (timed,) = found.kernels
  assert timed.kind == "fp8 matmuls (cuBLASLt)"
  assert timed.seconds == pytest.approx(timed.flops / 1979e12)


@pytest.mark.parametrize(("direction", "matmuls"), [("", 2), ("Backward", 5)])
def test_cudnn_attention_counts_the_matmuls_of_its_logits(direction, matmuls):
  found = timeline(
    "  %q = bf16[64,128,12,64]{3,2,1,0} parameter(0)\n"
    "  %k = bf16[64,512,12,64]{3,2,1,0} parameter(1)\n"
    "  %o = (bf16[64,12,128,64]{3,1,2,0}, u8[0]{0}) custom-call(%q, %k), "
    f'custom_call_target="__cudnn$fmhaSoftmax{direction}", backend_config={{"cudnn_fmha_backend_config": '
    '{"intermediate_tensor_shape": {"dimensions": ["64", "12", "128", "512"]}}}'
  )
  (timed,) = found.kernels
  assert timed.kind == "cuDNN attention"
  assert timed.flops == 2 * matmuls * 64 * 12 * 128 * 512 * 64


def test_our_attention_kernel_is_recognized_by_its_name():
  found = timeline(
    "  %q = bf16[64,128,12,64]{3,2,1,0} parameter(0)\n"
    "  %k = bf16[64,512,12,64]{3,2,1,0} parameter(1)\n"
    '  %o = bf16[64,128,12,64]{3,1,2,0} custom-call(%q, %k), custom_call_target="__gpu$xla.gpu.triton", '
    'metadata={op_name="jit(step)/jvp(T)/encoder/attention/forward_kernel/pallas_call"}'
  )
  (timed,) = found.kernels
  assert timed.kind == "Triton kernels"
  assert timed.flops == 2 * 2 * 64 * 12 * 128 * 512 * 64


def test_a_fusion_reads_only_the_slices_that_it_uses_and_writes_only_its_update():
  fusion = (
    "%fused (p0: f32[100,1000], p1: f32[100,1000], p2: s32[]) -> f32[100,1000] {\n"
    "  %p0 = f32[100,1000]{1,0} parameter(0)\n"
    "  %p1 = f32[100,1000]{1,0} parameter(1)\n"
    "  %p2 = s32[] parameter(2)\n"
    "  %s = f32[1,1000]{1,0} dynamic-slice(%p1, %p2, %p2), dynamic_slice_sizes={1,1000}\n"
    "  ROOT %u = f32[100,1000]{1,0} dynamic-update-slice(%p0, %s, %p2, %p2)\n}\n"
  )
  found = timeline(
    "  %x = f32[100,1000]{1,0} parameter(0)\n"
    "  %y = f32[100,1000]{1,0} parameter(1)\n"
    "  %i = s32[] parameter(2)\n"
    "  %f = f32[100,1000]{1,0} fusion(%x, %y, %i), kind=kLoop, calls=%fused",
    fusion,
  )
  (timed,) = found.kernels
  assert timed.bytes == 4000 + 4000 + 4
  assert (timed.bound, timed.seconds) == ("launches", 2e-6)


def test_a_gather_reads_only_the_elements_that_it_gathers_also_of_what_is_computed_from_an_operand():
  fusion = (
    "%fused (p0: bf16[6,50,1000], p1: s32[300,1]) -> f32[300,1] {\n"
    "  %p0 = bf16[6,50,1000]{2,1,0} parameter(0)\n"
    "  %p1 = s32[300,1]{1,0} parameter(1)\n"
    "  %c = f32[6,50,1000]{2,1,0} convert(%p0)\n"
    "  %h = f32[6,50,1000]{2,1,0} tanh(%c)\n"
    "  %b = f32[300,1000]{1,0} bitcast(%h)\n"
    "  ROOT %g = f32[300,1]{1,0} gather(%b, %p1), slice_sizes={1,1}\n}\n"
  )
  found = timeline(
    "  %x = bf16[6,50,1000]{2,1,0} parameter(0)\n"
    "  %i = s32[300,1]{1,0} parameter(1)\n"
    "  %f = f32[300,1]{1,0} fusion(%x, %i), kind=kLoop, calls=%fused",
    fusion,
  )
  assert found.kernels[0].bytes == 3 * 4 * 300


def test_a_fusion_reads_all_elements_of_an_operand_that_it_converts():
  fusion = (
    "%fused (p0: bf16[6,50]) -> f32[300] {\n"
    "  %p0 = bf16[6,50]{1,0} parameter(0)\n"
    "  %c = f32[6,50]{1,0} convert(%p0)\n"
    "  ROOT %b = f32[300]{0} bitcast(%c)\n}\n"
  )
  found = timeline(
    "  %x = bf16[6,50]{1,0} parameter(0)\n  %f = f32[300]{0} fusion(%x), kind=kLoop, calls=%fused",
    fusion,
  )
  assert found.kernels[0].bytes == (2 + 4) * 300


def test_fusions_are_classified_by_what_they_contain():
  fusions = (
    "%sums (a: f32[8,8]) -> f32[8] {\n  %a = f32[8,8]{1,0} parameter(0)\n"
    "  ROOT %r = f32[8]{0} reduce(%a, %a), dimensions={1}\n}\n"
    "%moves (a: f32[8,8]) -> f32[8,8] {\n  %a = f32[8,8]{1,0} parameter(0)\n"
    "  ROOT %t = f32[8,8]{0,1} transpose(%a), dimensions={1,0}\n}\n"
    "%maps (a: f32[8,8]) -> f32[8,8] {\n  %a = f32[8,8]{1,0} parameter(0)\n"
    "  ROOT %e = f32[8,8]{1,0} exponential(%a)\n}\n"
    "%multiplies (a: f32[8,4], b: f32[4,8]) -> f32[8,8] {\n  %a = f32[8,4]{1,0} parameter(0)\n"
    "  %b = f32[4,8]{1,0} parameter(1)\n"
    "  ROOT %d = f32[8,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n}\n"
  )
  found = timeline(
    "  %x = f32[8,8]{1,0} parameter(0)\n"
    "  %l = f32[8,4]{1,0} parameter(1)\n"
    "  %r = f32[4,8]{1,0} parameter(2)\n"
    "  %f1 = f32[8]{0} fusion(%x), kind=kInput, calls=%sums\n"
    "  %f2 = f32[8,8]{0,1} fusion(%x), kind=kLoop, calls=%moves\n"
    "  %f3 = f32[8,8]{1,0} fusion(%x), kind=kLoop, calls=%maps\n"
    "  %f4 = f32[8,8]{1,0} fusion(%l, %r), kind=kCustom, calls=%multiplies",
    fusions,
  )
  assert [timed.kind for timed in found.kernels] == [
    "reduction fusions",
    "copies and transposes",
    "loop fusions",
    "matmuls (Triton)",
  ]
  assert found.kernels[-1].flops == 2 * 8 * 4 * 8


LOOP = (
  "%body (t: (f32[16777216])) -> (f32[16777216]) {\n  %t = (f32[16777216]{0}) parameter(0)\n"
  "  %g = f32[16777216]{0} get-tuple-element(%t), index=0\n"
  "  %c = f32[16777216]{0} copy(%g)\n  ROOT %r = (f32[16777216]{0}) tuple(%c)\n}\n"
)


@pytest.mark.parametrize(("config", "times"), [('{"known_trip_count":{"n":"24"}}', 24), ("{}", 7)])
def test_a_loop_counts_as_often_as_it_runs(config, times):
  found = timeline(
    "  %x = (f32[16777216]{0}) parameter(0)\n"
    f"  %w = (f32[16777216]{{0}}) while(%x), condition=%cond, body=%body, backend_config={config}",
    LOOP,
    unknown_trips=7,
  )
  assert add_up(found.kernels, "kind")["copies and transposes"]["count"] == times
  assert found.seconds == pytest.approx(times * 2 * 4 * 16777216 / GPU.bandwidth)


@pytest.mark.parametrize(
  ("groups", "axes", "members"),
  [
    ("replica_groups={{0,2,4,6},{1,3,5,7}}", ("data",), 4),
    ("replica_groups=[4,2]<=[8]", ("model",), 2),
    ("replica_groups=[2,4]<=[4,2]T(1,0)", ("data",), 4),
    ("replica_groups=mesh['a'=4,'b'=2] {'a'}", ("data",), 4),
    ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", ("model",), 2),
    ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ("data",), 4),
    ("replica_groups={}", ("data", "model"), 8),
    ("replica_groups=[1,8]<=[8]", ("data", "model"), 8),
  ],
)
def test_the_devices_of_a_collective_are_named_by_their_mesh_axes(groups, axes, members):
  found = timeline(
    "  %x = f32[1000000]{0} parameter(0)\n"
    f"  %s = f32[1000000]{{0}} all-reduce-start(%x), channel_id=1, {groups}, to_apply=%add\n"
    "  %d = f32[1000000]{0} all-reduce-done(%s)"
  )
  (timed,) = found.collectives
  assert (timed.kind, timed.axes) == ("all-reduce", axes)
  assert timed.sent == pytest.approx(2 * (members - 1) / members * 4e6)


def test_work_between_start_and_end_of_a_collective_hides_its_time():
  copy = "  %c{0} = f32[100000000]{{0}} copy(%x)\n"
  start = "  %s = f32[250000000]{0} all-gather-start(%y), channel_id=1, replica_groups=[4,2]<=[8]\n"
  end = "  %d = f32[500000000]{0} all-gather-done(%s)\n"
  parameters = "  %x = f32[100000000]{0} parameter(0)\n  %y = f32[250000000]{0} parameter(1)\n"
  hidden = timeline(parameters + start + copy.format(1) + copy.format(2) + end)
  waited = timeline(parameters + copy.format(1) + copy.format(2) + start + end)
  seconds = 1e9 / GPU.nvlink
  work = 2 * 2 * 4e8 / GPU.bandwidth
  (first,), (second,) = hidden.collectives, waited.collectives
  assert first.seconds == second.seconds == pytest.approx(seconds)
  assert first.exposed_seconds == pytest.approx(seconds - work)
  assert waited.seconds - hidden.seconds == pytest.approx(work)
  assert hidden.seconds_by_bound["interconnect"] == pytest.approx(seconds - work)


def test_collectives_run_one_after_the_other():
  starts = "".join(
    f"  %s{n} = f32[250000000]{{0}} all-gather-start(%y), replica_groups=[4,2]<=[8]\n"
    for n in (1, 2)
  )
  ends = "".join(f"  %d{n} = f32[500000000]{{0}} all-gather-done(%s{n})\n" for n in (1, 2))
  found = timeline(f"  %y = f32[250000000]{{0}} parameter(0)\n{starts}{ends}")
  assert found.seconds == pytest.approx(2 * 1e9 / GPU.nvlink)


def test_sources_are_shortened_to_the_path_in_the_model():
  long = (
    "jit(train_step)/transpose(jvp(Transformer))/Transformer.decode/decoder/decoder._layers/layers_11/"
    "mlp/wi_0/wi_0._matmul/dot_general"
  )
  assert short_source(long) == "backward decoder/layers/mlp/wi_0/dot_general"
