"""T5X's `config_utils`: `run`, and functions for Fiddle, which raise because it is not supported."""

from rosetta_t5.compat.fiddle import run, using_fdl
from rosetta_t5.compat.fiddle import unsupported as config_with_fiddle
from rosetta_t5.compat.fiddle import unsupported as direct_summarize_fiddle_config
from rosetta_t5.compat.fiddle import unsupported as prepare_to_summarize
from rosetta_t5.compat.fiddle import unsupported as sanitize_summary_getter
