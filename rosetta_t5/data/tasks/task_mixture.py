"""A mixture of tasks without code: `MIXTURE_OR_TASK_NAME = @data.mixture()`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any

from rosetta_t5.argument_types import Positive, check_one_of, one_of
from rosetta_t5.data.tasks.catalogue import register, registered_names
from rosetta_t5.data.tensorflow_import import seqio

RATES = ("proportional", "equal")


def mixture(
  tasks: Sequence[str],
  *,
  rates: Annotated[str, one_of(RATES)] | Sequence[float] = "proportional",
  maximum: Positive | None = None,
  temperature: float = 1.0,
  name: str | None = None,
) -> str:
  """Registers a SeqIO mixture of tasks, and returns its name. A second call returns the same mixture.

  In a gin file, scopes distinguish several tasks on files:
  `data.mixture.tasks = [@news/data.file_task(), @books/data.file_task(), 'glue_mnli_v2']`.

  Args:
    tasks: names of tasks or mixtures: known ones, or what `data.file_task` returns.
    rates: how often examples of each task are drawn: a number for each task; "proportional" to the tasks'
      numbers of examples; or "equal".
    maximum: with proportional rates, the number of examples above which a task counts as having just as
      many (K of Raffel et al. 2020, section 3.5.2); None for no limit.
    temperature: proportional rates are raised to the power 1/temperature: 1 leaves them as they are, and
      larger values make them more equal.
    name: the name of the mixture; None derives one from the arguments.

  Raises:
    ValueError: a task does not exist, or the rates are not positive numbers, one for each task.
  """
  for task in tasks:
    register(task)
    if task not in registered_names():
      raise ValueError(f"data.mixture.tasks names {task!r}, but there is no such task or mixture")
  if isinstance(rates, str):
    check_one_of("data.mixture.rates", rates, RATES)
  elif len(rates) != len(tasks) or min(rates, default=0) <= 0:
    raise ValueError(
      f"data.mixture.rates must be a positive number for each of the {len(tasks)} tasks, "
      f"{' or '.join(map(repr, RATES))}, got {rates}"
    )
  if temperature <= 0:
    raise ValueError(f"data.mixture.temperature must be greater than 0, got {temperature}")
  arguments = repr((list(tasks), rates, maximum, temperature))
  name = name or f"mixture_{hashlib.blake2b(arguments.encode(), digest_size=5).hexdigest()}"

  def proportional(task: Any) -> float:
    # UL2's denoisers are tasks on the same files.
    number = max(part.num_input_examples("train") or 0 for part in seqio.get_subtasks(task))
    if not number:
      raise ValueError(f"the task '{task.name}' does not know its number of examples: set rates")
    return float(min(number, maximum or number) ** (1 / temperature))

  if name not in registered_names():
    numbers: list[Any] = [1.0] * len(tasks) if isinstance(rates, str) else [float(x) for x in rates]
    if rates == "proportional":
      mixtures = seqio.MixtureRegistry.names()  # SeqIO accepts only numbers as their rates.
      numbers = [
        proportional(seqio.MixtureRegistry.get(task)) if task in mixtures else proportional
        for task in tasks
      ]
    seqio.MixtureRegistry.add(name, list(zip(tasks, numbers, strict=True)))
  return name
