"""What `t5x` does as T5X does it: replaced names take effect, and submodules need no import.

Code written for T5X changes T5X by assignment: `decoding.beam_search = mine`, or
`mock.patch("t5x.utils.get_dataset")`. The modules of `t5x` only re-export, so the assignment alone would
have no effect on the functions of `rosetta_t5` that use the name.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any


class ReExports(types.ModuleType):
  """A module of `t5x`: an attribute that is set is also set wherever `rosetta_t5` has the old value.

  A module that has a function `when_replaced` is notified by a call of it.
  """

  # For each name that was replaced, the places that had its first value: (module, name there).
  _places: dict[str, list[tuple[types.ModuleType, str]]]

  def __getattr__(self, name: str) -> Any:
    """Imports a submodule on first use: after `import t5x`, programs use `t5x.utils` and others."""
    submodule = f"{self.__name__}.{name}"
    if (
      name.startswith("_")
      or "__path__" not in vars(self)
      or not importlib.util.find_spec(submodule)
    ):
      raise AttributeError(
        f"module {self.__name__!r} has no attribute {name!r}", name=name, obj=self
      )
    return importlib.import_module(submodule)

  def __setattr__(self, name: str, value: Any) -> None:
    if isinstance(value, types.ModuleType) and value.__name__ == f"{self.__name__}.{name}":
      value.__class__ = ReExports  # The import system sets a submodule when it has been imported.
    elif callable(old := self.__dict__.get(name)):
      self.__dict__.setdefault("_places", {}).setdefault(name, _places_of(old))
    for module, name_there in self.__dict__.get("_places", {}).get(name, ()):
      setattr(module, name_there, value)
      if (when_replaced := vars(module).get("when_replaced")) is not None:
        when_replaced()
    super().__setattr__(name, value)


def _places_of(value: Any) -> list[tuple[types.ModuleType, str]]:
  """Returns the modules of `rosetta_t5` that have a value, with its name in each of them."""
  modules = [m for name, m in sys.modules.items() if name.startswith("rosetta_t5.")]
  return [
    (module, name) for module in modules for name, found in vars(module).items() if found is value
  ]
