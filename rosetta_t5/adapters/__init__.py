"""Methods that train few parameters of a model: LoRA, DoRA, (IA)³, prompt tuning, BitFit, norms."""

from collections.abc import Mapping
from typing import Any

from rosetta_t5.adapters.adapter import Adapter, BitFit, Norms, PromptTuning, quantized
from rosetta_t5.adapters.kernel_adapters import IA3, LoRA

METHODS: dict[str, type[Adapter]] = {
  cls.__name__: cls for cls in (LoRA, IA3, PromptTuning, BitFit, Norms)
}


def from_settings(settings: Mapping[str, Any]) -> Adapter:
  """Returns the adapter whose `settings()` these are; other entries are ignored."""
  method = METHODS[settings["method"]]
  names = method.__dataclass_fields__.keys() & settings.keys()
  return method(**{name: settings[name] for name in names})
