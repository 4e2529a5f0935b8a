"""Runs a function of a random key leaf by leaf, so that equal initialisers are compiled once.

A T5's parameters come from a handful of different computations (an initialiser and a shape). As one
program XLA compiles each of hundreds of them; taken apart it compiles the handful.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from rosetta_t5.parallel import BasePartitioner

PyTree = Any

_FOLD_IN = "random_fold_in"
# A leaf that needs much of the whole program (an initialiser that looks at data) is no small slice;
# where slices together exceed the program this many times, it runs as one.
_MAX_GROWTH = 4


@dataclasses.dataclass(frozen=True)
class _Slice:
  """The part of a program that computes one of its results.

  Attributes:
    equations: in order.
    result: the variable or literal it computes.
    folded: the constants folded into keys, in order. Modules tell their keys apart by them, so they
      are passed as arguments: two slices that differ in nothing else are one function.
    signature: equal for slices that are one function.
  """

  equations: tuple[Any, ...]
  result: Any
  folded: tuple[Any, ...]
  signature: str


class LeafwiseFunction:
  """A function of a random key, traced once and compiled a leaf at a time.

  Attributes:
    out_shape: the tree of its results' shapes and dtypes.
    key: the shape and dtype of the key it is traced for.
  """

  def __init__(self, fn: Callable[[jax.Array], PyTree], key: jax.Array):
    """Traces `fn` for keys like `key`; nothing is computed."""
    self._fn = fn
    self._program, self.out_shape = jax.make_jaxpr(fn, return_shape=True)(key)
    self.key = jax.ShapeDtypeStruct(key.shape, key.dtype)

  def partition(
    self, partitioner: BasePartitioner, out_axes: PyTree
  ) -> Callable[[jax.Array], PyTree]:
    """Returns the function that computes each leaf where `out_axes` (PartitionSpecs) says."""
    slices = _slices(self._program)
    if sum(len(part.equations) for part in slices) > _MAX_GROWTH * len(self._program.eqns):
      return partitioner.partition(self._fn, None, out_axes)
    specs, structure = jax.tree.flatten(out_axes)
    kinds = [(part.signature, spec) for part, spec in zip(slices, specs, strict=True)]
    examples = dict(zip(kinds, slices, strict=True))
    programs = {
      (signature, spec): partitioner.partition(_evaluator(self._program, part), None, spec)
      for (signature, spec), part in examples.items()
    }

    def run(key: jax.Array) -> PyTree:
      leaves = [programs[kind](key, part.folded) for kind, part in zip(kinds, slices, strict=True)]
      return jax.tree.unflatten(structure, leaves)

    return run


def _slices(program: ClosedJaxpr) -> list[_Slice]:
  """Returns the slice of each of the program's results."""
  producer = {
    variable: number for number, eqn in enumerate(program.eqns) for variable in eqn.outvars
  }
  texts: dict[int, str] = {}
  return [_slice(program, result, producer, texts) for result in program.jaxpr.outvars]


def _slice(
  program: ClosedJaxpr, result: Any, producer: Mapping[Any, int], texts: dict[int, str]
) -> _Slice:
  numbers: set[int] = set()
  pending = [result]
  while pending:
    variable = pending.pop()
    number = None if isinstance(variable, Literal) else producer.get(variable)
    if number is not None and number not in numbers:
      numbers.add(number)
      pending.extend(program.eqns[number].invars)
  equations = tuple(program.eqns[number] for number in sorted(numbers))
  folded = tuple(
    np.asarray(eqn.invars[1].val, eqn.invars[1].aval.dtype) for eqn in equations if _folds(eqn)
  )
  return _Slice(equations, result, folded, _signature(program, equations, result, texts))


def _folds(equation: Any) -> bool:
  return equation.primitive.name == _FOLD_IN and isinstance(equation.invars[1], Literal)


def _signature(
  program: ClosedJaxpr, equations: tuple[Any, ...], result: Any, texts: dict[int, str]
) -> str:
  """Writes a slice down with its variables numbered in order of appearance."""
  inputs = (*program.jaxpr.invars, *program.jaxpr.constvars)
  names = {variable: f"in{number}" for number, variable in enumerate(inputs)}

  def name(variable: Any) -> str:
    if isinstance(variable, Literal):
      return f"{variable.val!r}:{variable.aval}"
    return names.setdefault(variable, f"v{len(names)}:{variable.aval}")

  def text(value: Any) -> str:
    # The same jitted function is the same object at each call, and long to write down.
    if id(value) not in texts:
      texts[id(value)] = str(value)
    return texts[id(value)]

  lines = []
  for eqn in equations:
    operands = [name(eqn.invars[0]), "folded"] if _folds(eqn) else [name(v) for v in eqn.invars]
    params = [f"{key}={text(value)}" for key, value in eqn.params.items()]
    lines.append(f"{[name(v) for v in eqn.outvars]} = {eqn.primitive.name}{params}{operands}")
  return "\n".join([*lines, name(result)])


def _evaluator(program: ClosedJaxpr, part: _Slice) -> Callable[..., jax.Array]:
  """Returns the function (key, folded constants) → result of a slice."""

  def evaluate(key: jax.Array, folded: tuple[Any, ...]) -> jax.Array:
    values = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    values[program.jaxpr.invars[0]] = key
    remaining = iter(folded)

    def read(variable: Any) -> Any:
      return variable.val if isinstance(variable, Literal) else values[variable]

    for eqn in part.equations:
      operands = [read(variable) for variable in eqn.invars]
      if _folds(eqn):
        operands[1] = next(remaining)
      bound = eqn.primitive.get_bind_params(eqn.params)
      functions, params = bound if isinstance(bound, tuple) else ((), bound)  # jax < 0.10: a pair
      results = eqn.primitive.bind(*functions, *operands, **params)
      results = results if eqn.primitive.multiple_results else [results]
      values.update(zip(eqn.outvars, results, strict=True))
    return jnp.asarray(read(part.result))

  return evaluate
