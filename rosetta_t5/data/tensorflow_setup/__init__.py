"""How TensorFlow is imported: on the CPU, quietly, and without Keras."""
