"""Pipelines over the mesh axis `pipeline`: `schedule` says what is computed when, `stages` computes it."""
