"""T5X's `export_lib`: exports a trained model for other programs."""

from rosetta_t5.export.functions import (
  CustomInferenceMode,
  create_batch_polymorphic_shapes,
  create_inference_function,
  create_postprocessor,
  create_preprocessor,
  create_preprocessor_from_task,
  load_stablehlo,
)
from rosetta_t5.export.saved_model import ExportableModule, save, write_warmup_examples
