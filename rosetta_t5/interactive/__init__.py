"""A model in a notebook, and the way from there to a run."""
