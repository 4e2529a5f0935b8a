"""Families of Transformers' models, one module each. A new module of this package is a new family.

Weights are in the plain tree (`parameter_trees`), by our names. A model_type is that of a config.json. Each module has:

  MODEL_TYPES       {model_type: the class in Transformers, or its beginning if there are an encoder's and
                    an encoder-decoder's}
  IS_DECODER        whether the networks are decoders (TransformerConfig), else T5s (T5Config); a decoder's
                    ids are one higher than Transformers', unless id 0 is padding there too
  FIXED             entries of config.json with the only value that our networks support, the default
  CLASS_DEFAULTS    {model_type: entries of config.json that mean this where a folder leaves them out}
  DEFAULTS          entries of config.json for a model that does not come from one
  IGNORED           a compiled pattern of Transformers' names that are no weights, or that it ignores
  weight_table      (config.json) → the `WeightMapping`s of all weights, by the names of Transformers' modules
  has               (weights) → whether they are of this family; the first such module is used
  sizes             (weights) → the fields of the network's config that the shapes show
  network_settings  (config.json, weights) → all of its fields
  read_arrays       ({Transformers' name: array}, config.json) → weights
  find_model_type   (weights, network's config or None, config.json that the model came with or {}) → model_type
  make_config       (weights, network's config, model_type, config.json that the model came with or {})
                    → the family's entries of config.json
  make_weights      (weights, config.json) → {Transformers' name: array}

The functions raise ValueError for models that one of the two sides does not have.
"""

import importlib
import pkgutil
from typing import Any

from rosetta_t5.checkpoints.formats.hugging_face.name_tables import Arrays

_FAMILIES: list[Any] = [
  importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)
]
BY_MODEL_TYPE = {name: family for family in _FAMILIES for name in family.MODEL_TYPES}


def find_family(arrays: Arrays) -> Any:
  """Returns the module of the family to which weights in the plain tree belong."""
  return next(family for family in _FAMILIES if family.has(arrays))
