"""Loads, compares and trains vocabularies."""
