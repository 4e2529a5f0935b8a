"""Benchmarks for a user's own machine. They need no data, recipe or TensorFlow."""
