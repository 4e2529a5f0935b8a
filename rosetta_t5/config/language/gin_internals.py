"""The state that gin-config keeps in private names: registered functions, bindings and imports.

No other module uses a name of gin that begins with an underscore. tests/config/test_gin_internals.py
fails with advice if a version of gin-config lacks one of them.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import gin
from gin.config import Configurable
from gin.config_parser import ImportStatement

# A scope, such as "train_eval" or "", and the full name of a registered function.
ScopeAndName = tuple[str, str]

# The function that holds a macro's value; the scope is the macro's name.
MACRO = "gin.macro"


def registered_configurables() -> list[Configurable]:
  """Returns every function and class that is registered with gin."""
  return [configurable for _, configurable in gin.config._REGISTRY.items()]


def find_configurables(name: str) -> list[Configurable]:
  """Returns the registered functions whose full name is `name` or ends in `.name`."""
  registry = gin.config._REGISTRY
  return [registry[selector] for selector in registry.matching_selectors(name)]


def shortest_name(selector: str) -> str:
  """Returns the shortest name of a registered function that no other one shares."""
  return str(gin.config._REGISTRY.minimal_selector(selector))


def configurable_of(function: Callable[..., Any]) -> Configurable:
  """Returns gin's record of a registered function.

  Raises:
    KeyError: it is not registered.
  """
  return gin.config._INVERSE_REGISTRY[function]


def register_under_own_module(function: Callable[..., Any]) -> Configurable:
  """Registers a function or class under the module that defines it, whatever gin files call it.

  Raises:
    ValueError: another one of this module and name is registered.
  """
  module, name = function.__module__, function.__qualname__
  source = (ImportStatement(module, False, None, None), name)
  gin.config._make_configurable(
    function, name=name, module=module, import_source=source, avoid_class_mutation=True
  )
  return configurable_of(function)


def unregister(function: Callable[..., Any]) -> None:
  """Removes a function from gin's registry, if it is there.

  Functions that it displaced, because they have the same name, can then be registered again.
  """
  registry, inverse = gin.config._REGISTRY, gin.config._INVERSE_REGISTRY
  for selector, configurable in list(registry.items()):
    if configurable.wrapped is function:
      registry.pop(selector)
  registered = {id(configurable) for _, configurable in registry.items()}
  for key, configurable in list(inverse.items()):
    if id(configurable) not in registered:
      del inverse[key]


def all_bindings() -> dict[ScopeAndName, dict[str, Any]]:
  """Returns the bound arguments of every function in every scope. Macros are among the functions."""
  return {key: dict(bound) for key, bound in gin.config._CONFIG.items()}


def arguments_in_use() -> dict[ScopeAndName, dict[str, Any]]:
  """Returns the arguments, bound or default, of every registered function called so far."""
  with gin.config._OPERATIVE_CONFIG_LOCK:
    return {key: dict(used) for key, used in gin.config._OPERATIVE_CONFIG.items()}


def format_bindings(bindings: Mapping[ScopeAndName, Mapping[str, Any]]) -> str:
  """Returns bindings as the text of a gin file, with the imports that they need."""
  return str(gin.config._config_str(bindings))


def is_macro_set(name: str) -> bool:
  """Returns whether a macro of this name has a value, or a gin constant of this name exists."""
  is_constant = bool(gin.config._CONSTANTS.matching_selectors(name))
  return is_constant or (name, MACRO) in gin.config._CONFIG


def record_imports(statements: Iterable[ImportStatement]) -> None:
  """Adds import statements to those that `format_bindings` writes."""
  gin.config._IMPORTS.update(statements)


def imported_modules() -> list[str]:
  """Returns the names of the modules that gin files have imported."""
  return sorted({statement.module for statement in gin.config._IMPORTS})
