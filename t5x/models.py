"""T5X's `models`: encoder-decoder and decoder-only models."""

from rosetta_t5.models import *
from rosetta_t5.models.base_model import *
from rosetta_t5.models.batch_metrics import *
from rosetta_t5.models.decoder_only import *
from rosetta_t5.models.encoder_decoder import *
from t5x import decoding, losses  # type: ignore[no-redef]
from t5x import metrics as metrics_lib  # type: ignore[no-redef]
