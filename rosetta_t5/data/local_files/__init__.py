"""Local copies of public data sets, vocabularies, and the quickstart's text."""
