"""Benchmarks that a user runs on a machine of their own: no data, no recipe, no TensorFlow."""
