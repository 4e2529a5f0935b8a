"""What to change when a device runs out of memory; reads the devices' memory statistics."""

from rosetta_t5.memory_advice.inference import Inference, answered_when_evaluating
from rosetta_t5.memory_advice.training import answered_when_out_of_memory
