"""T5X's older checkpoint managers, and its functions on checkpoints."""
