"""rosetta-t5: pretrains, finetunes, evaluates and runs T5-family models from Gin files on JAX."""

__version__ = "0.1.0"
