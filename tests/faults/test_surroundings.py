"""What happens to commands whose output, terminal, disk or folder fails."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from fault import Fault, fault_table

# A disk of its own for the metrics, which is full until a checkpoint appears.
FULL_DISK_OF_METRICS = """
rm -r run && mkdir -p run/train && mount -t tmpfs -o size=64k tmpfs run/train || exit 9
trap 'umount --lazy run/train' EXIT
cat /dev/zero > run/train/fill 2> full
"""

FAULTS = [
  Fault(
    "the reader of a run's output ends after a line",
    "set -o pipefail; $TRAIN --gin.TRAIN_STEPS=6 2> errors | head -1; status=$?;"
    "cat errors run/run-log.jsonl; test -e run/checkpoint_6 && exit $status",
    expected=r'lines of standard output: \d+ \(Broken pipe\).*"event": "lost".*"event": "end".*"lost"',
    status=74,
    fast=True,
  ),
  Fault(
    "both outputs of a run are closed",
    "$TRAIN --gin.TRAIN_STEPS=6 >&- 2>&-; status=$?;"
    "cat run/run-log.jsonl; test -e run/checkpoint_6 && exit $status",
    expected=r'"event": "lost".*lines of standard output: \d+ \(it is closed\)',
    status=74,
  ),
  Fault(
    "both outputs of a run go to a full disk",
    "$TRAIN --gin.TRAIN_STEPS=6 > /dev/full 2>&1 < /dev/null; status=$?;"
    "cat run/run-log.jsonl; test -e run/checkpoint_6 && exit $status",
    expected=r'"end".*lines of standard output: \d+ \(No space left on device\)',
    status=74,
  ),
  Fault(
    "a run's input is closed",
    "$TRAIN --gin.TRAIN_STEPS=6 <&- && test -e run/checkpoint_6",
    expected="done +step 6",
    status=0,
  ),
  Fault(
    "the terminal of a run hangs up",
    "$TRAIN --gin.TRAIN_STEPS=40 & until test -e run/checkpoint_6; do sleep 0.1; done;"
    "kill -HUP %1; wait %1 && test -e run/checkpoint_40",
    expected="done +step 40",
    status=0,
  ),
  Fault(
    "the reader of an evaluation's output has ended",
    "$EVAL 2> errors > >(true); status=$?; cat errors; exit $status",
    expected=r"lines of standard output: \d+ \(Broken pipe\)",
    status=74,
  ),
  Fault(
    "the reader of a conversion's output has ended",
    "rosetta-t5 convert run converted --to hf 2> errors > >(true); status=$?;"
    "cat errors; test -e converted/model.safetensors && exit $status",
    expected=r"lines of standard output: \d+ \(Broken pipe\)",
    status=74,
  ),
  Fault(
    "the reader of a short command's output ends after a line",
    "set -o pipefail; rosetta-t5 ckpt show run/checkpoint_4 2>&1 | head -1",
    expected="^target[^\n]*\n$",
    status=141,
    fast=True,
  ),
  Fault(
    "the output of a short command goes to a full disk",
    "rosetta-t5 ckpt show run > /dev/full",
    expected="error: standard output: No space left on device",
    fast=True,
  ),
  Fault(
    "the disk of the metrics is full, and has space again later",
    FULL_DISK_OF_METRICS
    + "(until test -e run/checkpoint_10; do sleep 0.1; done; rm run/train/fill) &"
    "$TRAIN --gin.TRAIN_STEPS=40; status=$?;"
    "cat run/run-log.jsonl; test -e run/train/events* && exit $status",
    expected=r'metric lines: \d+ \(No space left on device\).*"event": "lost".*"finished"',
    status=74,
    keeps=False,
  ),
  Fault(
    "the folder of the metrics is removed during a run",
    "(until test -e run/checkpoint_8; do sleep 0.1; done; rm -r run/train) &"
    "$TRAIN --gin.TRAIN_STEPS=40; status=$?; ls run; exit $status",
    expected=r"done +step 40.*metric lines: \d+ \(the files in run/train were removed\)",
    status=74,
  ),
  Fault(
    "the files of a run cannot be replaced by its metrics, samples and descriptions",
    "rm run/*.*; mkdir run/model-info.txt run/run-log.jsonl run/config.gin;"
    "rm -r run/train; touch run/train; $TRAIN --gin.TRAIN_STEPS=6",
    expected=r"done +step 6.*lines of run-log.jsonl: \d+ \(Is a directory\)",
    status=74,
  ),
]


@fault_table(FAULTS)
def test_faults_of_surroundings(fault: Fault, check_fault: Callable[[Fault], None]) -> None:
  if "mount" in fault.commands and os.geteuid() != 0:
    pytest.skip("only root can mount a small disk")
  check_fault(fault)
