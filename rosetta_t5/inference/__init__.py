"""Predictions and scores over datasets and texts, and evaluation with them."""

from rosetta_t5.inference.infer_fn import get_infer_fn
