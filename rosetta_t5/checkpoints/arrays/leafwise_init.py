"""Initialization leaf by leaf, which compiles each distinct initializer only once.

The parameters of a T5 come from a few distinct computations, each an initializer and a shape. XLA
would compile one program with hundreds of them. If it is split by leaf, only the distinct ones are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

from rosetta_t5.parallel import BasePartitioner

PyTree = Any

# A leaf that depends on most of the program (such as an initializer that uses data) has a large slice.
# If all slices together are at least this many times as long as the program, it runs as a whole.
_MAX_GROWTH = 4


class _Slice(NamedTuple):
  """The part of a program that computes one of its outputs.

  Attributes:
    program: a function of the random key and of the folded constants.
    folded: the constants that modules fold into the key. They are arguments of the program, so that
      two modules with equal initializers have equal programs.
  """

  program: Jaxpr
  folded: tuple[np.ndarray, ...]


class LeafwiseFunction:
  """A function of a random key that is traced once and compiled leaf by leaf.

  Attributes:
    out_shape: the tree of the outputs' shapes and dtypes.
    key: the shape and dtype of the key for which it is traced.
  """

  def __init__(self, fn: Callable[[jax.Array], PyTree], key: jax.Array):
    """Traces `fn` for keys like `key` without computing anything."""
    self._fn = fn
    self._program, self.out_shape = jax.make_jaxpr(fn, return_shape=True)(key)
    self.key = jax.ShapeDtypeStruct(key.shape, key.dtype)

  def partition(
    self, partitioner: BasePartitioner, out_axes: PyTree
  ) -> Callable[[jax.Array], PyTree]:
    """Returns a function that computes each leaf with the sharding in `out_axes` (PartitionSpecs)."""
    program = self._program.jaxpr
    producers = {variable: n for n, eqn in enumerate(program.eqns) for variable in eqn.outvars}
    slices = [_slice_for_output(program, output, producers) for output in program.outvars]
    if sum(len(part.program.eqns) for part in slices) >= _MAX_GROWTH * len(program.eqns):
      return partitioner.partition(self._fn, None, out_axes)
    specs, structure = jax.tree.flatten(out_axes)
    # Programs with equal text are equal, because jax numbers the variables in order of appearance.
    kinds = [(str(part.program), spec) for part, spec in zip(slices, specs, strict=True)]
    compiled = {
      (text, spec): partitioner.partition(
        _evaluator(part.program, self._program.consts), None, spec
      )
      for (text, spec), part in dict(zip(kinds, slices, strict=True)).items()
    }

    def run(key: jax.Array) -> PyTree:
      leaves = [compiled[kind](key, part.folded) for kind, part in zip(kinds, slices, strict=True)]
      return jax.tree.unflatten(structure, leaves)

    return run


def _slice_for_output(program: Jaxpr, output: Any, producers: Mapping[Any, int]) -> _Slice:
  """Returns the part of a program that computes `output`.

  Args:
    producers: for each variable, the index of the equation that computes it.
  """
  needed: set[int] = set()
  pending = [output]
  while pending:
    variable = pending.pop()
    index = None if isinstance(variable, Literal) else producers.get(variable)
    if index is not None and index not in needed:
      needed.add(index)
      pending.extend(program.eqns[index].invars)
  equations, folded_inputs, folded = [], [], []
  for eqn in (program.eqns[index] for index in sorted(needed)):
    if eqn.primitive.name == "random_fold_in" and isinstance(constant := eqn.invars[1], Literal):
      aval: Any = constant.aval
      folded_inputs.append(Var(aval))
      folded.append(np.asarray(constant.val, aval.dtype))
      eqn = eqn.replace(invars=[eqn.invars[0], folded_inputs[-1]])
    equations.append(eqn)
  inputs = [*program.invars, *folded_inputs]
  debug_info = program.debug_info.with_unknown_names()
  sliced = Jaxpr(program.constvars, inputs, [output], equations, debug_info=debug_info)
  return _Slice(sliced, tuple(folded))


def _evaluator(program: Jaxpr, constants: list[Any]) -> Callable[..., jax.Array]:
  """Returns the function (key, folded constants) → output of a slice."""
  function = jaxpr_as_fun(ClosedJaxpr(program, constants))

  def evaluate(key: jax.Array, folded: tuple[Any, ...]) -> jax.Array:
    return jnp.asarray(function(key, *folded)[0])

  return evaluate
