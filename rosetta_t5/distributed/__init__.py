"""The processes of one run: how they join and compare settings, how they end together, signals, watchdog."""

from rosetta_t5.distributed.coordination import draw_seed, join_processes
from rosetta_t5.distributed.signals import (
  EvaluationInterrupted,
  InterruptionListener,
  RunInterrupted,
  until_interrupted,
)
from rosetta_t5.distributed.watchdog import Watchdog
