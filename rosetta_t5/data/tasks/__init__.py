"""SeqIO tasks: known by name, or made from your own files."""
