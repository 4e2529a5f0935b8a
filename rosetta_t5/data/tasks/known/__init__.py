"""The known tasks as tables: pretraining, GLUE, other supervised ones. No TensorFlow."""
