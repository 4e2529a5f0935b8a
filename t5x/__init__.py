"""T5X's module names. Each module re-exports names from the packages of `rosetta_t5`."""

import sys

from rosetta_t5 import __version__
from rosetta_t5.compat.replaced_names import ReExports

sys.modules[__name__].__class__ = ReExports
