"""Inference over datasets and texts, and evaluation by inference."""

from rosetta_t5.inference.infer_fn import get_infer_fn
