"""T5X's `state_utils`: flattening, union, intersection and renaming of nested state dicts."""

from rosetta_t5.checkpoints.arrays.state_dicts import *
from t5x.checkpoints import get_name_tree, intersect_state
