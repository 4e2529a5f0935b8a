"""How a model calls its decode function: beam search, sampling, or one that a user wrote."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax

# What a function of the user's may leave out, and when it may not.
_OPTIONAL = {
  "cache_offset": "the module scans its layers, so that the cache's batch dimension comes second",
  "initial_index": "the cache is filled with prompts of different lengths",
  "decode_rng": "",
}


@runtime_checkable
class TokensIdsToLogitsCallable(Protocol):
  """What a decode function asks for the next token's logits."""

  def __call__(self, decoding_state: Any) -> tuple[jax.Array, Mapping[str, Any]]:
    """Returns the logits [batch · decodes, vocabulary] and the new cache; see `DecodingState`."""


@runtime_checkable
class DecodeFnCallable(Protocol):
  """What a model calls to decode, by keywords (T5X: DecodeFnCallable)."""

  def __call__(
    self,
    *,
    inputs: jax.Array,
    cache: Mapping[str, Any],
    tokens_to_logits: TokensIdsToLogitsCallable,
    eos_id: int,
    num_decodes: int,
    decode_rng: jax.Array | None,
    cache_offset: int,
    **kwargs: Any,
  ) -> tuple[jax.Array, jax.Array]:
    """Returns decodes [batch, num_decodes, length], best last, and scores [batch, num_decodes].

    Args:
      inputs: [batch, length] a prompt, shifted right by one position; 0 where tokens are wanted.
      cache: the model's cache for `batch` sequences.
      tokens_to_logits: returns the next token's logits.
      eos_id: the token that ends a sequence.
      num_decodes: how many decodes are wanted.
      decode_rng: a key. Optional: only handed over if the caller has one.
      cache_offset: 1 if the cache's batch dimension comes second. Optional.
      **kwargs: `decoder_params` of the caller.
    """


def accepts(function: Callable[..., Any], argument: str) -> bool:
  """Tells whether a function can be called with the keyword `argument`."""
  parameters = inspect.signature(function).parameters.values()
  return any(p.name == argument or p.kind is p.VAR_KEYWORD for p in parameters)


def call_decode_fn(
  decode_fn: Callable[..., tuple[jax.Array, jax.Array]],
  decoder_params: Mapping[str, Any] | None,
  rng: jax.Array | None,
  optional: Mapping[str, Any],
  **arguments: Any,
) -> tuple[jax.Array, jax.Array]:
  """Calls the model's decode function with what it takes.

  Args:
    decode_fn: beam search, sampling or the like.
    decoder_params: the caller's arguments; they go before the model's.
    rng: the caller's key, for `decode_rng`.
    optional: T5X's arguments that the function may lack, where they have no effect.
    **arguments: those that every decode function takes.

  Raises:
    ValueError: there are two keys, or the function lacks an argument that it must have.
  """
  given = dict(decoder_params or {})
  if rng is not None:
    if given.get("decode_rng") is not None:
      raise ValueError(
        "there are two keys for decoding, the argument rng and decoder_params['decode_rng']: give one"
      )
    given["decode_rng"] = rng
  for name, value in optional.items():
    if accepts(decode_fn, name):
      given.setdefault(name, value)
    elif name != "cache_offset" or value:
      raise ValueError(
        f"the decode function {_name(decode_fn)} needs an argument {name}, as {_OPTIONAL[name]}"
      )
  if rng is not None and not accepts(decode_fn, "decode_rng"):
    del given["decode_rng"]  # The function draws nothing at random.
  _check_names(decode_fn, given)
  return decode_fn(**{**arguments, **given})


def _check_names(decode_fn: Callable[..., Any], given: Mapping[str, Any]) -> None:
  """Raises ValueError for a decoder parameter that the function does not take."""
  for name in given:
    if not accepts(decode_fn, name):
      known = list(inspect.signature(decode_fn).parameters)
      near = difflib.get_close_matches(name, known, n=1)
      raise ValueError(
        f"decoder_params has {name!r}, which the decode function {_name(decode_fn)} does not take"
        + (f" (did you mean {near[0]!r}?)" if near else "")
        + f": it takes {', '.join(known)}"
      )


def _name(decode_fn: Any) -> str:
  if isinstance(decode_fn, functools.partial):
    return _name(decode_fn.func)
  return getattr(decode_fn, "__name__", None) or type(decode_fn).__name__
