"""The arrays that are live at a step's peak memory, each of which is counted once."""

from __future__ import annotations

from rosetta_t5.gpu_program.hlo import live_arrays, parse_program

PROGRAM = """HloModule step
%body (p: (f32[100])) -> (f32[100]) {
  %p = (f32[100]) parameter(0)
  %x = f32[100] get-tuple-element(%p), index=0
  %update.1 = f32[100] add(%x, %x), metadata={op_name="jit(step)/layers/update"}
  ROOT %result = (f32[100]) tuple(%update.1)
}
ENTRY %main (a: f32[100]) -> f32[10] {
  %zeros.1 = f32[100] broadcast()
  %init = (f32[100]) tuple(%zeros.1)
  %while.1 = (f32[100]) while(%init), condition=%c, body=%body
  %done = f32[100] get-tuple-element(%while.1), index=0
  %large.1 = f32[120] add(%done, %done)
  ROOT %sum.1 = f32[10] add(%large.1, %large.1)
}
"""
ASSIGNMENT = """BufferAssignment:
allocation 0: size 920, preallocated-temp:
 value: <1 zeros.1 @0> (size=400,offset=0): f32[100]{0}
 value: <2 update.1 @0> (size=400,offset=0): f32[100]{0}
 value: <3 large.1 @0> (size=480,offset=400): f32[120]{0}
 value: <4 sum.1 @0> (size=40,offset=880): f32[10]{0}
"""
RANGES = """  BufferLiveRange:
    zeros.1{}:0-2
    update.1{}:2-3
    while.1{0}:4-6
    large.1{}:6-7
    sum.1{}:7-8
  Live ranges at 3 (peak):
    update.1{}: 400 bytes (cumulative: 400 bytes)
    while.1{0}: 400 bytes (cumulative: 800 bytes)
"""


def test_the_result_of_a_loop_is_the_array_that_the_loop_writes():
  found = live_arrays(ASSIGNMENT, RANGES, parse_program(PROGRAM))
  # When `large` is computed, and not in the loop, whose array XLA's own list counts twice.
  assert [(each.shape, each.source, each.bytes) for each in found] == [
    ("f32[120]", "large.1", 480),
    ("f32[100]", "while.1", 400),
  ]


def test_the_parameter_of_the_step_is_not_the_result_of_a_loop():
  text = PROGRAM.replace(
    "  %zeros.1", "  %a = (f32[100], f32[9]) parameter(0)\n  %zeros.1"
  ).replace("ROOT %sum.1", "%sum.1")
  text = text.removesuffix("}\n") + "  ROOT %out = (f32[10]) tuple(%sum.1)\n}\n"
  ranges = RANGES.replace("  BufferLiveRange:", "  BufferLiveRange:\n    a{0}:0-8\n    a{1}:0-8")
  found = live_arrays(ASSIGNMENT, ranges, parse_program(text))
  assert found == live_arrays(ASSIGNMENT, RANGES, parse_program(PROGRAM))


def test_a_loop_can_write_one_of_several_results_of_a_fusion():
  text = PROGRAM.replace(
    "%update.1 = f32[100] add(%x, %x)",
    "%both.1 = (f32[9], f32[100]) fusion(%x), calls=%f\n"
    "  %update.1 = f32[100] get-tuple-element(%both.1), index=1",
  )
  assignment = ASSIGNMENT.replace("update.1 @0", "both.1{1} @0")
  ranges = RANGES.replace("update.1{}:2-3", "both.1{1}:2-3")
  found = live_arrays(assignment, ranges, parse_program(text))
  assert found == live_arrays(ASSIGNMENT, RANGES, parse_program(PROGRAM))


def test_empty_reports_give_no_arrays():
  assert live_arrays("", "", parse_program(PROGRAM)) == []
