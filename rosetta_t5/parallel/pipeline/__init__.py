"""Pipelines over the mesh axis `pipeline`: how a batch and a stack of layers are divided."""
