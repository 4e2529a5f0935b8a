"""Optimizers that treat a parameter as a matrix, or that estimate the curvature of the loss."""
