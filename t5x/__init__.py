"""T5X's module names: names from the packages of `rosetta_t5`, and what exists only because T5X had it.

Code written for T5X changes T5X by assignment: `decoding.beam_search = mine`, or
`mock.patch("t5x.utils.get_dataset")`. Most names of these modules are imported from `rosetta_t5`, so the assignment
alone would have no effect on the functions there that use the name.
"""

import importlib.util
import sys
import types
from typing import Any

from rosetta_t5 import __version__


class ReExports(types.ModuleType):
  """A module of `t5x`: what is set here is also set wherever `rosetta_t5` has the old value.

  A module's function `on_name_set`, if it has one, is called after each assignment to one of its names.
  """

  def __getattr__(self, name: str) -> Any:
    """Returns a module of `t5x`, as which T5X's modules import one another, or one of IMPORTED_NAMES.

    `t5x.utils` needs no import but that of `t5x`, `t5x.examples.t5.network.layers` is the module beside
    it, and `t5x.trainer.metrics_lib` is `t5x.metrics`.
    """
    beside = self.__name__ if "__path__" in vars(self) else self.__name__.rpartition(".")[0]
    for package in (beside, "t5x") if name[:1] != "_" else ():
      module = f"{package}.{name.removesuffix('_lib')}"
      if importlib.util.find_spec(module):
        return importlib.import_module(module)
    if not name.startswith("__"):  # The import system asks modules for names such as `__path__`.
      from t5x.aliases import IMPORTED_NAMES

      if name in IMPORTED_NAMES:
        return IMPORTED_NAMES[name]
    raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name, obj=self)

  def __setattr__(self, name: str, value: Any) -> None:
    if isinstance(value, types.ModuleType) and value.__name__ == f"{self.__name__}.{name}":
      value.__class__ = ReExports  # The import system sets a submodule when it has been imported.
    elif callable(replaced := vars(self).get(name)):
      _replace_below(replaced, value)
    super().__setattr__(name, value)
    if "on_name_set" in vars(self):
      self.on_name_set()


def _replace_below(old: Any, new: Any) -> None:
  """Replaces a function or class wherever a module of `rosetta_t5` has it."""
  # Modules may have been imported since the last replacement.
  for module in [m for name, m in sys.modules.items() if name.startswith("rosetta_t5.")]:
    for name in [name for name, found in vars(module).items() if found is old]:
      setattr(module, name, new)


sys.modules[__name__].__class__ = ReExports
