"""T5X's `contrib.gpu.t5.layers`."""

from t5x.examples.t5.layers import *
