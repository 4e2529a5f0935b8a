"""`rosetta-t5 report`: one page that shows training runs from the files in their folders."""
