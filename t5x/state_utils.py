"""T5X's `state_utils`: flattening, union, intersection and renaming of nested state dicts."""

from rosetta_t5.checkpoints.arrays.state_dicts import (
  apply_assignment_map,
  flatten_state_dict,
  merge_state,
  tensorstore_leaf,
)
from t5x.checkpoints import get_name_tree, intersect_state
