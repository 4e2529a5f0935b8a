"""Inference over datasets and examples: for evaluation, for files of predictions, for one sentence."""

from rosetta_t5.inference.infer_fn import get_infer_fn
