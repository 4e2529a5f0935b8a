"""T5X's example networks."""
