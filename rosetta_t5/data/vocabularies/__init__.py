"""Vocabularies: loaded, compared and trained."""
