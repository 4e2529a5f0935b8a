"""A model in a notebook."""
