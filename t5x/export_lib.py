"""T5X's `export_lib`: exports a trained model for other programs."""

from rosetta_t5.export.functions import *
from rosetta_t5.export.saved_model import ExportableModule, save, write_warmup_examples
