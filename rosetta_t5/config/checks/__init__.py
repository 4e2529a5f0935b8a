"""Checks of a bound configuration: missing, misspelt, unused and wrong values."""
