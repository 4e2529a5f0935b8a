"""Local copies of public datasets and vocabularies, and the text of the quickstart."""
