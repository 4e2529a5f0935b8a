"""The names of activations in Transformers and in flax."""

from __future__ import annotations

# {Transformers' name: this project's}. Of several with one value, the first is the one that is written.
_NAMES = {
  "relu": "relu",
  "gelu_new": "gelu",
  "gelu_pytorch_tanh": "gelu",
  "gelu": "exact_gelu",
  "silu": "silu",
  "swish": "silu",
  "tanh": "tanh",
  "sigmoid": "sigmoid",
}


def flax_name(entry: str, name: str) -> str:
  """Returns this project's name of the activation in an entry of config.json.

  Raises:
    ValueError: this project does not have it.
  """
  if name not in _NAMES:
    raise ValueError(f"{entry} must name one of the activations {', '.join(_NAMES)}, got {name!r}")
  return _NAMES[name]


def transformers_name(name: str) -> str:
  """Returns Transformers' name of one of this project's activations.

  Raises:
    ValueError: Transformers does not have it.
  """
  name = "silu" if name == "swish" else name
  for theirs, ours in _NAMES.items():
    if ours == name:
      return theirs
  known = ", ".join(dict.fromkeys(_NAMES.values()))
  raise ValueError(f"the activation must be one of {known} for Transformers, got {name!r}")
