"""What `plan` knows of a step of a network, from its traced loss."""

from __future__ import annotations

from typing import Any

from tiny_models import make_decoder_only_model, make_model

from rosetta_t5.networks.transformer import T5Config, Transformer
from rosetta_t5.parallel import PjitPartitioner
from rosetta_t5.plan.memory import StateMemory
from rosetta_t5.plan.workload import Workload, state_shapes, traced_activations, workload_of


def planned_work(
  config: Any,
  lengths: dict[str, int],
  examples: float,
  mesh: dict[str, int],
  partitioner: Any = None,
  loss_chunk_length: int | None = None,
  adapter: Any = None,
  kernel: str | None = None,
  **changes: Any,
) -> Workload:
  """Returns a step with so many examples on each device of a mesh that need not exist."""
  is_t5 = isinstance(config, T5Config)
  if is_t5:
    arguments = {"loss_chunk_length": loss_chunk_length, "adapter": adapter}
    model = make_model(Transformer(config), **arguments)
  else:
    model = make_decoder_only_model(config, adapter=adapter)
  partitioner = partitioner or PjitPartitioner(num_partitions=1)
  state = state_shapes(model, 1, lengths, trained=adapter is not None)
  activations = traced_activations(model, partitioner, state, lengths)
  assert activations is not None
  work = workload_of(model, partitioner, 1, mesh, activations, kernel)
  return work.replace(examples=examples, **changes)


def activation_bytes(work: Workload) -> float:
  """Returns what a step needs besides the train state, which is empty here."""
  gradients = [0.0] * len(work.activations.segments)
  return sum(StateMemory({"params": 0.0}, 0.0, gradients).step(work).values())
