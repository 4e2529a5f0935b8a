"""T5X's `interactive_model`: a model for interactive use, such as in a notebook."""

from rosetta_t5.compat.interactive_gin import T5XScriptType, get_gin_config_from_interactive_model
from rosetta_t5.compat.script_functions import (
  extract_tokens_and_aux_values as _extract_tokens_and_aux_values,
)
from rosetta_t5.data.pipeline.text_examples import (
  get_batches_from_seqio,
  get_dataset_from_natural_text_examples,
  get_seqio_task_from_examples,
)
from rosetta_t5.inference.text_inference import InferenceType
from rosetta_t5.interactive.model import InteractiveModel
from rosetta_t5.interactive.open_model import open_model
