"""T5X's contrib/moe: models, partitioner, trainer and checkpointer for mixtures of experts."""
