"""The arrays that are live at a step's peak memory, as XLA reports them."""

from __future__ import annotations

from rosetta_t5.gpu_program.hlo import live_arrays, parse_program

PROGRAM = """HloModule step
%body (p: (f32[100])) -> (f32[100]) {
  %p = (f32[100]) parameter(0)
  %x = f32[100] get-tuple-element(%p), index=0
  %update.1 = f32[100] add(%x, %x), metadata={op_name="jit(step)/layers/update"}
  ROOT %result = (f32[100]) tuple(%update.1)
}
ENTRY %main (a: f32[100]) -> (f32[7], f32[100]) {
  %init = (f32[7], f32[100]) parameter(0)
  ROOT %while.1 = (f32[7], f32[100]) while(%init), condition=%c, body=%body
}
"""
RANGES = """  BufferLiveRange:
    update.1{}:2-3
    while.1{1}:4-6
  Live ranges at 3 (peak):
    update.1{}: 400 bytes (cumulative: 400 bytes)
    while.1{1}: 400 bytes (cumulative: 800 bytes)
"""


def test_arrays_have_their_type_shape_source_and_bytes():
  found = live_arrays(RANGES, parse_program(PROGRAM))
  assert [(each.shape, each.source, each.bytes) for each in found] == [
    ("f32[100]", "layers/update", 400),
    ("f32[100]", "while.1", 400),
  ]


def test_an_empty_report_gives_no_arrays():
  assert live_arrays("", parse_program(PROGRAM)) == []
