"""T5X's `contrib.moe`: mixtures of experts."""
