"""Builds batches on the mesh from a `DatasetConfig`."""
