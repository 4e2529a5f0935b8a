"""The command `rosetta-t5`: a table of verbs, and one way to parse, run and end them."""

from rosetta_t5.cli.command import VERBS, begin, main, parse, run_module
