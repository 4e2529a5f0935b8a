"""T5X's `export_lib`: exports a trained model for other programs."""

from rosetta_t5.export.inference_function import (
  CustomInferenceMode,
  create_inference_function,
  load_stablehlo,
)
from rosetta_t5.export.saved_model import ExportableModule, save, write_warmup_examples
from rosetta_t5.export.text_functions import (
  create_batch_polymorphic_shapes,
  create_postprocessor,
  create_preprocessor,
  create_preprocessor_from_task,
)
