"""Hugging Face folders of the T5 and GPT families: read and written."""
