"""Parses, checks and binds the command line and gin files. No other package imports gin."""

from rosetta_t5.config.command_line import rewrite_gin_args, run
from rosetta_t5.config.configuration import ResolvedRun, parse_gin_flags
from rosetta_t5.config.gin_functions import bool_fn, steps_of, string_split_fn, sum_fn
from rosetta_t5.config.launch import run_from_command_line
from rosetta_t5.config.saved_config import (
  bindings_of,
  changes_since,
  get_gin_config_str,
  summarize_gin_config,
)
from rosetta_t5.user_errors import ConfigError
