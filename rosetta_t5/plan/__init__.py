"""Computes what a run will need from shapes alone. Nothing runs, and no device is used."""

from rosetta_t5.plan.description import describe_run
