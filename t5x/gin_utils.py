"""T5X's `gin_utils`: parsing of gin flags, summaries of the configuration, functions for gin files."""

from rosetta_t5.config import (
  bool_fn,
  get_gin_config_str,
  parse_gin_flags,
  rewrite_gin_args,
  run,
  steps_of,
  string_split_fn,
  sum_fn,
  summarize_gin_config,
)
