"""Exports a trained model to formats that other programs run: SavedModel and StableHLO."""
