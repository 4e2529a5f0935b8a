"""Optimizers with T5X's interface: its Adafactor, and every optimizer of optax."""
