"""Stands before the package t5 on the path, so that it is as if it were not installed."""

raise ImportError("the package t5 is not to be used here")
