"""What a run will be, told before it begins: nothing is computed and no device is touched."""

from rosetta_t5.plan.describe import describe_run

__all__ = ["describe_run"]
