"""Checks of a configuration: missing, misspelt, unused and wrong values."""
