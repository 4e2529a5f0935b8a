"""The config.json of Transformers with which a model came, and whether a run's network computes the same."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from rosetta_t5.checkpoints.arrays.parameter_trees import to_plain_tree
from rosetta_t5.checkpoints.checkpoint_folders import read_run_facts
from rosetta_t5.checkpoints.config import (
  RestoreCheckpointConfig,
  get_first_valid_restore_config_and_paths,
)
from rosetta_t5.checkpoints.formats.hugging_face import folder
from rosetta_t5.checkpoints.restore import read_arrays

# The run fact with the config.json of the model that a run started from.
_FACT = "source_config"
# Fields that a run may choose: precision, and how full experts may be. Tables are compared by their shapes.
_FREE = ("vocab_size", "max_length", "float32_attention_logits", "expert_capacity", "route_padding")
_log = logging.getLogger(__name__)


def read_source_config(path: epath.PathLike) -> dict[str, Any]:
  """Returns the config.json of Transformers with which a checkpoint's model came; {} if there is none.

  It is a file of a Hugging Face folder and of a checkpoint that was converted from one. Runs that started
  from either store it as a run fact.
  """
  file = epath.Path(path) / folder.CONFIG
  if file.exists():
    return folder.read_config(file)
  with contextlib.suppress(ValueError):  # Damaged facts are reported by the restore.
    return dict(read_run_facts(path).get(_FACT) or {})
  return {}


def source_fact(path: epath.PathLike | None) -> dict[str, Any]:
  """Returns the run fact that states which config.json the model of a checkpoint came with; {} if none."""
  config = read_source_config(path) if path else {}
  return {_FACT: config} if config else {}


def check_source_configs(model: Any, restore_cfg: RestoreCheckpointConfig | None) -> None:
  """Checks that a model computes what the config.json of its checkpoints states.

  Args:
    model: the run's model.
    restore_cfg: the checkpoints. Only Hugging Face folders and checkpoints converted from one have the file.

  Raises:
    ValueError: the network has other settings, or the vocabulary another end token. With `strict = False`
      the difference is logged.
  """
  cfg, paths = get_first_valid_restore_config_and_paths([restore_cfg] if restore_cfg else [])
  for path in filter(lambda path: (epath.Path(path) / folder.CONFIG).exists(), paths):
    file = epath.Path(path) / folder.CONFIG
    config = folder.read_config(file)
    settings = folder.network_settings(file, config, to_plain_tree(read_arrays(path)))
    if config.get("pad_token_id"):
      _log.warning(
        "%s: pad_token_id is %s, but token 0 is padding here, so texts must not contain token 0",
        *(file, config["pad_token_id"]),
      )
    differences = [
      *_differing_settings(settings, model.network_config),
      *_differing_end(config, model, settings["vocab_size"]),
    ]
    message = f"{file} does not describe this run's model. Set\n  " + "\n  ".join(differences)
    if differences and (cfg is None or cfg.strict):
      raise ValueError(
        f"{message}\nor accept another computation with RestoreCheckpointConfig.strict = False"
      )
    if differences:
      _log.warning("%s", message)


def _differing_settings(settings: Mapping[str, Any], network: Any) -> Iterator[str]:
  for name, value in settings.items():
    given = getattr(network, name, value)  # A user's own network may lack the field.
    given = tuple(given) if isinstance(given, list) else given
    if name not in _FREE and given != value:
      yield f"network.{type(network).__name__}.{name} = {value!r} (it is {given!r})"


def _differing_end(config: Mapping[str, Any], model: Any, vocabulary_size: int) -> Iterator[str]:
  expected, given = config.get("eos_token_id"), model.output_vocabulary.eos_id
  is_shifted = folder.has_shifted_ids(config)
  ends = [x for x in (expected if isinstance(expected, list) else [expected]) if x is not None]
  ends = [end + is_shifted for end in ends if end + is_shifted < vocabulary_size]
  if ends and given is not None and given not in ends:
    yield (
      f"the vocabulary to the one of the folder, whose texts end with token {expected} (the end of this "
      f"run's vocabulary is token {given - is_shifted})"
    )
