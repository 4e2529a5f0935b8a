"""Compiles a run's steps for GPUs that this machine does not have, and describes the program."""
