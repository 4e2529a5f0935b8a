"""A user's package, written for T5X: its own network, model, trainer, partitioner, data and actions."""
