"""Conversion between nested and flat state dicts."""

from __future__ import annotations

from flax.core import freeze

from rosetta_t5.checkpoints.arrays import state_dicts
from rosetta_t5.compat.checkpoints.checkpoint_loading import get_name_tree, intersect_state


def test_unflattening_restores_empty_nodes():
  nested = {"a": {"b": 1, "c": {}}, "d": 2}
  flat = state_dicts.flatten_state_dict(nested, keep_empty_nodes=True)
  assert set(flat) == {"a/b", "a/c", "d"}
  assert state_dicts.unflatten_state_dict(flat) == nested
  assert state_dicts.flatten_state_dict(freeze(nested)) == {"a/b": 1, "d": 2}


def test_name_tree_has_a_name_in_place_of_each_leaf():
  assert get_name_tree({"a": {"b": 1}}) == {"a": {"b": "a/b"}}
  assert get_name_tree({"a": {"b": {}}}, keep_empty_nodes=True) == {"a": {"b": "a/b"}}


def test_the_intersection_has_the_values_of_the_first_state():
  assert intersect_state({"a": {"b": 1, "c": 2}}, {"a": {"b": 9}}) == {"a": {"b": 1}}


def test_merging_adds_missing_values_or_overwrites_all():
  mine, scratch = {"a": {"b": 1}}, {"a": {"b": 9, "c": 2}}
  assert state_dicts.merge_state(mine, scratch) == {"a": {"b": 1, "c": 2}}
  assert state_dicts.merge_state(mine, scratch, overwrite=True) == {"a": {"b": 9, "c": 2}}
