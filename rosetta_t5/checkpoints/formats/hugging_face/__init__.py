"""Reads and writes Transformers' folders of the T5 and GPT families."""
