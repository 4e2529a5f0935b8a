"""T5X's `contrib.moe.training_utils`: changing arrays of a tree by their names."""

from rosetta_t5.compat.moe.trainer import match_fn, scale_sharded_grads, tree_map_with_names
