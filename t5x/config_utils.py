"""T5X's `config_utils`: `run`, and functions for Fiddle, which raise because it is not supported."""

from rosetta_t5.compat.fiddle import (
  config_with_fiddle,
  direct_summarize_fiddle_config,
  prepare_to_summarize,
  run,
  sanitize_summary_getter,
  using_fdl,
)
