"""T5X's `state_utils`: nested state dicts as flat ones, and their union and intersection."""

from rosetta_t5.checkpoints.state_dicts import (
  flatten_state_dict,
  get_name_tree,
  intersect_state,
  merge_state,
)

__all__ = ["flatten_state_dict", "get_name_tree", "intersect_state", "merge_state"]
