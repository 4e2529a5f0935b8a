"""What happens to runs whose checkpoints are damaged, swapped, copied or missing."""

from __future__ import annotations

from collections.abc import Callable

from fault import Fault, fault_table

FAULTS = [
  Fault(
    "a run goes on after its last step",
    "$TRAIN --gin.TRAIN_STEPS=6 && test -e run/checkpoint_6",
    expected="steps     4 to 6, from run/checkpoint_4",
    status=0,
    fast=True,
  ),
  Fault(
    "the largest array file of the newest checkpoint is cut to half",
    'truncate_to_half "$(largest run/checkpoint_4/state)"; $TRAIN --gin.TRAIN_STEPS=6',
    expected="checkpoint_4 cannot be read.*steps     2 to 6",
    status=0,
  ),
]


@fault_table(FAULTS)
def test_faults_of_checkpoints(fault: Fault, check_fault: Callable[[Fault], None]) -> None:
  check_fault(fault)
