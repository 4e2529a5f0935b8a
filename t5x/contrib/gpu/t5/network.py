"""T5X's `contrib.gpu.t5.network`."""

from t5x.examples.t5.network import *
