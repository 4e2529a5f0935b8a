"""Suggests what to change when a device runs out of memory."""

from rosetta_t5.memory_advice.inference import (
  InferenceMemoryAdvisor,
  explain_out_of_memory_in_evaluation,
)
from rosetta_t5.memory_advice.suggestions import OutOfMemoryError
from rosetta_t5.memory_advice.training import explain_out_of_memory
