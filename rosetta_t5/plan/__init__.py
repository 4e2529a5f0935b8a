"""What a run will be, computed before it begins: nothing runs and no device is touched."""

from rosetta_t5.plan.describe import describe_run
