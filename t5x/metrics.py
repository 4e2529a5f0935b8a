"""T5X's `metrics`: sums, averages per step and rates per second that merge over steps and hosts."""

from rosetta_t5.telemetry.metrics import *
