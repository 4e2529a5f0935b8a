"""A trained model as a file that other programs run: StableHLO, and TensorFlow's SavedModel."""
