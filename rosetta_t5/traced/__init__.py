"""Traced losses: their arrays, matmuls and layers, whatever the network, and their FLOPs."""
