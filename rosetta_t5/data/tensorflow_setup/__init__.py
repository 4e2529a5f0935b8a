"""Imports TensorFlow and SeqIO on the CPU, quietly and without Keras."""
