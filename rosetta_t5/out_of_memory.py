"""Adds the settings that usually help to the errors of devices that run out of memory."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from rosetta_t5.plan.memory import state_bytes
from rosetta_t5.terminal import size_text

_FSDP = 'partitioning.PjitPartitioner.mesh = {"fsdp": N}: N devices share parameters and optimizer'
TRAINING = (
  "trainer.Trainer.num_microbatches = N: computes the batch in N parts, with the same result",
  "network.T5Config.remat_policy = 'minimal' or 'full': computes activations again instead of storing them",
  _FSDP,
)
INITIALIZATION = (_FSDP, "partitioning.PjitPartitioner.zero1 = True: devices share the optimizer")
INFERENCE = (
  "utils.DatasetConfig.batch_size, or --batch_size: a smaller number",
  "TASK_FEATURE_LENGTHS: smaller numbers, which truncate longer texts",
  "partitioning.PjitPartitioner.num_partitions = N: N devices share the model",
)


class OutOfMemoryError(RuntimeError):
  """A device does not have enough memory for the run. The text suggests what to change."""


@contextmanager
def explain_out_of_memory(settings: Sequence[str]) -> Iterator[None]:
  """Adds settings that save memory to XLA's out-of-memory errors inside the `with`.

  Args:
    settings: one per line, such as `TRAINING`.

  Raises:
    OutOfMemoryError: instead of XLA's error.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    first = str(error).splitlines()[0]
    raise OutOfMemoryError(_message(first, settings)) from error


def device_memory() -> float:
  """Returns the bytes of a device, or a CPU device's share of the machine's memory."""
  stats = jax.local_devices()[0].memory_stats() or {}
  host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  return float(stats.get("bytes_limit", host / jax.local_device_count()))


def check_state_fits(initializer: Any, partitioner: Any) -> None:
  """Raises OutOfMemoryError if a train state is larger than a device's memory.

  On a CPU, the operating system would end the process.

  Args:
    initializer: provides the shapes of the state and its PartitionSpecs.
    partitioner: provides the mesh.
  """
  memory = device_memory()
  state, specs = initializer.global_train_state_shape, initializer.train_state_axes
  needed = sum(state_bytes(state, specs, partitioner.mesh.shape).values())
  if needed > memory:
    sizes = f"{size_text(needed)} on each device, which has {size_text(memory)}"
    raise OutOfMemoryError(_message(f"the train state needs {sizes}", INITIALIZATION))


def _message(problem: str, settings: Sequence[str]) -> str:
  lines = "".join(f"\n  {setting}" for setting in settings)
  return (
    f"a device is out of memory: {problem}\nThese settings save memory:{lines}\n"
    "`rosetta-t5 plan RECIPE --devices N` estimates the memory and lists the fastest settings that fit."
  )
