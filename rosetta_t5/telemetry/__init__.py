"""Metrics, console, TensorBoard, a run's own files, the GPUs' data sheets, NaN reports."""
