"""Arguments that T5X once had. Gin files that set them still run; the values are ignored."""

from __future__ import annotations

# Pairs (function or class, argument).
RETIRED_ARGUMENTS = {
  # Whether arrays are global: since jax 0.4 all arrays are. T5X's own export.gin still sets False.
  *(
    (name, "use_gda")
    for name in ("RestoreCheckpointConfig", "SaveCheckpointConfig", "train", "evaluate", "infer")
  ),
  # The same. T5X's own sparse_upcycle.gin still sets True.
  ("train", "use_jax_array"),
  # The number of values that the model's function returns. T5X's own export.gin sets the default, None.
  ("create_inference_function", "output_len"),
}
