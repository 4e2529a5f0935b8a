"""What a run will be, told before it begins: nothing is computed and no device is touched."""

from rosetta_t5.plan.describe import describe_run
from rosetta_t5.plan.inference_out_of_memory import Inference, answered_when_evaluating
from rosetta_t5.plan.out_of_memory import answered_when_out_of_memory

__all__ = ["Inference", "answered_when_evaluating", "answered_when_out_of_memory", "describe_run"]
