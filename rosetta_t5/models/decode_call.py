"""The interface of decode functions, and how a model calls one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax

from rosetta_t5.argument_types import near_hint
from rosetta_t5.decoding import TokensToLogits

# T5X's name.
TokensIdsToLogitsCallable = TokensToLogits

# The arguments that a user's function may lack, and when it must have them.
_OPTIONAL = {
  "cache_offset": "the module scans its layers, which makes the batch the cache's second dimension",
  "initial_index": "the cache has been prefilled with prompts of different lengths",
}


@runtime_checkable
class DecodeFnCallable(Protocol):
  """A decode function, which a model calls with keyword arguments (T5X: DecodeFnCallable)."""

  def __call__(
    self,
    *,
    inputs: jax.Array,
    cache: Mapping[str, Any],
    tokens_to_logits: TokensToLogits,
    eos_id: int,
    num_decodes: int,
    decode_rng: jax.Array | None,
    cache_offset: int,
    **kwargs: Any,
  ) -> tuple[jax.Array, jax.Array]:
    """Returns decodes [batch, num_decodes, length], best last, and scores [batch, num_decodes].

    Args:
      inputs: [batch, length] a prompt, shifted right by one position; 0 where tokens are generated.
      cache: the model's cache for `batch` sequences.
      tokens_to_logits: returns the next token's logits.
      eos_id: the token that ends a sequence.
      num_decodes: the number of decodes per sequence.
      decode_rng: a random key. Optional: it is only passed if the caller has one.
      cache_offset: 1 if the batch is the cache's second dimension. Optional.
      **kwargs: the caller's `decoder_params`.
    """


def has_argument(function: Callable[..., Any], argument: str) -> bool:
  """Returns whether a function has a parameter of this name."""
  return argument in inspect.signature(function).parameters


def accepts(function: Callable[..., Any], argument: str) -> bool:
  """Returns whether a function can be called with the keyword `argument`."""
  parameters = inspect.signature(function).parameters
  return argument in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def call_decode_fn(
  decode_fn: Callable[..., tuple[jax.Array, jax.Array]],
  decoder_params: Mapping[str, Any] | None,
  rng: jax.Array | None,
  optional: Mapping[str, Any],
  **arguments: Any,
) -> tuple[jax.Array, jax.Array]:
  """Calls a model's decode function with the arguments that it accepts.

  Args:
    decode_fn: the decode function.
    decoder_params: the caller's arguments, which override the model's.
    rng: the caller's random key, for `decode_rng`.
    optional: T5X's arguments that the function may lack if they have no effect.
    **arguments: the arguments that every decode function has.

  Raises:
    ValueError: there are two random keys, or the function lacks an argument that it needs.
  """
  params = dict(decoder_params or {})
  if rng is not None:
    if params.get("decode_rng") is not None:
      raise ValueError(
        f"Got RNG both from the `rng` argument ({rng}) and `decoder_params['decode_rng']` "
        f"({params['decode_rng']}). Please specify one or the other."
      )
    params["decode_rng"] = rng
  for name, value in optional.items():
    if accepts(decode_fn, name):
      params.setdefault(name, value)
    elif name != "cache_offset" or value:
      raise ValueError(
        f"the decode function {_name(decode_fn)} needs an argument {name}, because {_OPTIONAL[name]}"
      )
  if rng is not None and not accepts(decode_fn, "decode_rng"):
    del params["decode_rng"]  # the function does not use randomness
  _check_names(decode_fn, params)
  return decode_fn(**{**arguments, **params})


def set_decode_fn(model: Any, decode_fn: Callable[..., Any], **options: Any) -> None:
  """Makes a model decode with a function and values of its arguments, such as repetition_penalty=1.2.

  Raises:
    ValueError: the function does not accept one of them.
  """
  _check_names(decode_fn, options)
  model._decode_fn = functools.partial(decode_fn, **options)


def _check_names(decode_fn: Callable[..., Any], params: Mapping[str, Any]) -> None:
  """Raises ValueError for a decoder parameter that the function does not accept."""
  for name in params:
    if not accepts(decode_fn, name):
      known = list(inspect.signature(decode_fn).parameters)
      raise ValueError(
        f"decoder_params has {name!r}, which the decode function {_name(decode_fn)} does not accept"
        f"{near_hint(name, known)}: it accepts {', '.join(known)}"
      )


def _name(decode_fn: Any) -> str:
  if isinstance(decode_fn, functools.partial):
    return _name(decode_fn.func)
  return getattr(decode_fn, "__name__", None) or type(decode_fn).__name__
