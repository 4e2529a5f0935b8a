"""How TensorFlow and SeqIO are imported, and SeqIO's private names."""
