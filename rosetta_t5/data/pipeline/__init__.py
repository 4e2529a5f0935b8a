"""From a `DatasetConfig` to batches on the mesh."""
