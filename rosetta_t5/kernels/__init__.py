"""Attention, cross-entropy and fp8 matmuls as functions of arrays."""
