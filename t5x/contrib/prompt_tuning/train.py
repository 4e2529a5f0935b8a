"""The modules `train.{layers, optim, partitioning, prompts, utils}`, `masks` and `extended.train.ia3` of T5X's prompt tuning.

Each name is an argument of gin files that run here as they are (see `config.t5x_surface.stand_in_of`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from etils import epath
from flax.traverse_util import flatten_dict

from rosetta_t5.checkpoints import saved_items
from rosetta_t5.files import complete_folder
from rosetta_t5.training.optimizers.factor_rules import standard_logical_factor_rules
from t5x import checkpoints
from t5x.contrib import flaxformer
from t5x.contrib.prompt_tuning import prompts


class Prompt(flaxformer.Part):
  """The prompt of an encoder, which precedes its inputs: a `prompts.Prompt`."""

  names = "prompt"


class PromptEncoder(flaxformer.Encoder):
  """The stack of encoder layers, after the prompt that `prompt_factory` makes."""

  names = f"{flaxformer.Encoder.names} prompt_factory add_fake_prompt_factory"

  def settings(self) -> dict[str, Any]:
    """Returns the settings of `T5Config` that the stack and the prompt make."""
    prompt = self.prompt_factory().prompt
    return {**super().settings(), "prompt_length": prompt.length, "prompt_init": prompt.prompt_init}


def PromptEncoderDecoder(
  *, encoder_mask_factory: Any = None, add_fake_prompt_factory: Any = None, **parts: Any
) -> nn.Module:
  """Returns flaxformer's `EncoderDecoder` of these parts. A network with a prompt has its masks."""
  return flaxformer.EncoderDecoder(**parts)


class IA3(flaxformer.Part):
  """Scales the hidden layer of a feed-forward block, as `adapters.IA3` does."""

  names = "axis_name"


class IA3Attention(flaxformer.Part):
  """Scales the keys or values of attention, as `adapters.IA3` does."""

  names = "axis_names"


def add_fake_prompt(prompt_length: int, multitask: bool = False) -> None:
  """Has no effect: a network with a prompt has its mask."""


def create_prompt_encoder_mask(prompt_length: int) -> None:
  """Has no effect: a network with a prompt has its mask."""


def standard_logical_axis_rules() -> tuple[tuple[str, None], ...]:
  """Returns the rules of a prompt's axes, which the standard rules have too."""
  return (("prompt", None), ("prompt_embed", None))


def match_any(regexes: Sequence[str]) -> Callable[[str, Any], bool]:
  """Returns a function of a parameter's name and value: whether a regular expression matches the whole name."""
  return lambda path, _: any(re.fullmatch(regex, path) for regex in regexes)


class Checkpointer(checkpoints.Checkpointer):
  """Also writes each parameter that `save_paths` match to numpy_checkpoints/checkpoint_STEP/NAME.

  In NAME, dots replace slashes. These files are never deleted.
  """

  def __init__(self, *arguments: Any, save_paths: Sequence[str], **options: Any):
    """Creates a `t5x.checkpoints.Checkpointer` with its arguments."""
    super().__init__(*arguments, **options)
    self._is_saved = match_any(save_paths)

  def save(self, train_state: Any, *arguments: Any, **options: Any) -> None:  # type: ignore[override]
    """Writes the files, then the checkpoint."""
    step = int(np.asarray(saved_items.get_local_data(train_state.step)))
    folder = epath.Path(self.checkpoints_dir) / "numpy_checkpoints" / f"checkpoint_{step}"
    if jax.process_index() == 0:
      with complete_folder(folder) as unfinished:
        unfinished.mkdir(parents=True)
        for name, value in flatten_dict(train_state.params, sep="/").items():
          if self._is_saved(name, None):
            with (unfinished / name.replace("/", ".")).open("wb") as file:
              np.save(file, np.asarray(saved_items.get_local_data(value), self._save_dtype))
    super().save(train_state, *arguments, **options)
