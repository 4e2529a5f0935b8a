"""Tables of Transformers' names: of weights, which a family lists row by row, and of activations."""

import collections
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rosetta_t5.argument_types import check_one_of
from rosetta_t5.checkpoints.arrays import lazy_arrays
from rosetta_t5.checkpoints.arrays.lazy_arrays import Arrays, StoredArray

Config = Mapping[str, Any]  # the content of a config.json
# The entry of config.json that marks a decoder whose ids are those of its SentencePiece vocabulary.
PADDING_IS_TOKEN_0 = "padding_is_token_0"
UNKNOWN_HEADS = (
  "the heads and windows of a decoder cannot be derived from its weights: set --config to the config.gin of the run "
  "that trained it, or to the config.json that it came with"
)
_NAMES_SHOWN = 8
# {Transformers' name: this project's}. Of several with one value, the first is the one that is written.
_ACTIVATIONS = {
  "relu": "relu",
  "gelu_new": "gelu",
  "gelu_pytorch_tanh": "gelu",
  "gelu": "exact_gelu",
  "silu": "silu",
  "swish": "silu",
  "tanh": "tanh",
  "sigmoid": "sigmoid",
}


class WeightMapping(NamedTuple):
  """One weight of Transformers, in every layer that has it, and the parameters that it holds.

  In the names, {n} stands for the number of a layer and {e} for that of an expert. A parameter holds
  the weights of all experts of its layer, stacked along the first axis.

  Attributes:
    theirs: Transformers' name.
    ours: flat names of our parameters; the weight is several of them joined along the last axis.
    is_transposed: whether the weight is the transpose of our matrix, as in PyTorch's Linear.
    is_required: whether every model of the family has the weight, in every layer.
  """

  theirs: str
  ours: tuple[str, ...]
  is_transposed: bool = False
  is_required: bool = True


Table = Sequence[WeightMapping]


def count_layers(names: Iterable[str], prefix: str) -> int:
  """Returns the number of layers: how many different numbers follow `prefix` in `names`."""
  pattern = re.compile(rf"{re.escape(prefix)}(\d{{1,9}})\b")
  return len({match[1] for name in names if (match := pattern.match(name))})


def from_transformers(weights: Arrays, table: Table, family: str) -> dict[str, StoredArray]:
  """Returns {our name: array} for {Transformers' name: array}; the values are read later.

  Args:
    weights: the model's weights.
    table: the weights of the family.
    family: its name in messages.

  Raises:
    ValueError: a weight is not in the table, or a required one is missing.
  """
  rows = {row.theirs: row for row in table}
  found = find_rows(weights, rows, f"weights that {family} does not have")
  required: set[str] = set()
  for row in filter(lambda row: row.is_required, table):
    prefix, number, _ = row.theirs.partition("{n}")
    layers = count_layers(weights, prefix) if number else 1
    required |= {row.theirs.format(n=n) for n in range(layers)}
  if missing := required - weights.keys():
    raise ValueError(f"the folder lacks weights of its {family}: {list_names(missing)}")
  arrays: dict[str, StoredArray] = {}
  experts: dict[str, dict[int, StoredArray]] = collections.defaultdict(dict)
  for name, (row, numbers) in found.items():
    array = lazy_arrays.transpose(weights[name]) if row.is_transposed else weights[name]
    names = [ours.format(**numbers) for ours in row.ours]
    size = array.shape[-1] // len(names)
    if "e" in numbers:
      experts[names[0]][int(numbers["e"])] = array
      continue
    for part, ours in enumerate(names):
      arrays[ours] = lazy_arrays.slice_axis(array, -1, part * size, (part + 1) * size)
  for name, parts in experts.items():
    arrays[name] = lazy_arrays.stack([parts[number] for number in sorted(parts)], 0)
  return arrays


def to_transformers(arrays: Arrays, table: Table, family: str) -> dict[str, StoredArray]:
  """Returns {Transformers' name: array} for {our name: array}; the values are read later.

  Args:
    arrays: the model's parameters.
    table: the weights of the family.
    family: its name in messages.

  Raises:
    ValueError: a parameter is not in the table.
  """
  rows = {name: row for row in table for name in row.ours}
  found = find_rows(arrays, rows, f"parameters that Transformers' {family} cannot hold")
  weights: dict[str, StoredArray] = {}
  for name, (row, numbers) in found.items():
    if name != row.ours[0].format(**numbers):
      continue  # It is joined with the first of its row.
    parts = [arrays[ours.format(**numbers)] for ours in row.ours]
    stored = {row.theirs: parts[0] if len(parts) == 1 else lazy_arrays.concatenate(parts, -1)}
    if "{e}" in row.theirs:
      stored = {
        row.theirs.replace("{e}", str(e)): lazy_arrays.index_axis(parts[0], 0, e)
        for e in range(parts[0].shape[0])
      }
    for theirs, array in stored.items():
      weight = lazy_arrays.transpose(array) if row.is_transposed else array
      weights[theirs.format(**numbers)] = weight
  return weights


def find_rows(
  names: Iterable[str], rows: Mapping[str, WeightMapping], unknown: str
) -> dict[str, tuple[WeightMapping, dict[str, str]]]:
  """Returns {name: (its row, the numbers in it)} for {template: row}.

  Raises:
    ValueError: no template fits a name; `unknown` says what such names are.
  """
  patterns = [
    (re.compile(re.sub(r"\\\{(\w)\\\}", r"(?P<\1>\\d{1,9})", re.escape(template))), row)
    for template, row in rows.items()
  ]
  found = {
    name: (row, match.groupdict())
    for name in names
    for pattern, row in patterns
    if (match := pattern.fullmatch(name))
  }
  if others := [name for name in names if name not in found]:
    raise ValueError(f"{unknown}: {list_names(others)}")
  return found


def list_names(names: Iterable[str]) -> str:
  """Returns the first names, and how many more there are."""
  in_order = sorted(names)
  more = len(in_order) - _NAMES_SHOWN
  return ", ".join(in_order[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def are_equal(a: StoredArray, b: StoredArray) -> bool:
  """Compares two matrices in parts, so that tables of gigabytes are never in memory as a whole."""
  if a is b:
    return True
  return a.shape == b.shape and all(np.array_equal(a.read(p), b.read(p)) for p in a.parts())


def start_token(config: Config) -> int:
  """Returns the token that starts a decoder's text; 0 if config.json names none that is in the vocabulary."""
  for name in ("bos_token_id", "eos_token_id"):
    token = config.get(name)
    if isinstance(token, int) and 0 <= token < config["vocab_size"]:
      return token
  return 0


def layer_pattern(kinds: Sequence[str], layers: int, entry: str) -> tuple[str, ...]:
  """Returns the shortest pattern whose repetition is the kinds of all layers.

  Raises:
    ValueError: `entry` of config.json has another number of them.
  """
  if len(kinds) != layers:
    raise ValueError(f"{entry} must name the kind of each of {layers} layers, got {len(kinds)}")
  period = next(
    n for n in range(1, layers + 1) if all(kind == kinds[i % n] for i, kind in enumerate(kinds))
  )
  return tuple(kinds[:period])


def without_tied_head(
  arrays: dict[str, StoredArray], embedding: str, head: str, config: Config
) -> dict[str, StoredArray]:
  """Returns arrays without an output layer that is the embedding table too.

  Raises:
    ValueError: there is none, although `tie_word_embeddings` is False.
  """
  is_tied = config["tie_word_embeddings"]
  if head not in arrays and not is_tied:
    raise ValueError("tie_word_embeddings is False, but there are no weights of an output layer")
  if head in arrays and is_tied:
    kernel = arrays.pop(head)
    # As in Transformers 5, an output layer that differs is used although the config says that it is tied.
    if not are_equal(lazy_arrays.transpose(kernel), arrays[embedding]):
      arrays[head] = kernel
  return arrays


def our_activation(entry: str, name: str) -> str:
  """Returns this project's name of the activation in an entry of config.json.

  Raises:
    ValueError: this project does not have it.
  """
  check_one_of(entry, name, _ACTIVATIONS)
  return _ACTIVATIONS[name]


def their_activation(name: str) -> str:
  """Returns Transformers' name of one of this project's activations.

  Raises:
    ValueError: Transformers does not have it.
  """
  theirs = {ours: name for name, ours in reversed(_ACTIVATIONS.items())} | {"swish": "silu"}
  check_one_of("for Transformers, the activation", name, theirs)
  return theirs[name]
