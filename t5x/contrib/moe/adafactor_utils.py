"""T5X's `contrib.moe.adafactor_utils`: Adafactor's rules for experts."""

from rosetta_t5.compat.moe.upcycling import logical_factor_rules
