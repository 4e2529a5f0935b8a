"""Metrics, console, TensorBoard, a run's own files, FLOPs, the GPUs' data sheets, NaN reports."""
