"""T5X's `examples.decoder_only.layers`."""

from t5x.examples.t5.layers import *
