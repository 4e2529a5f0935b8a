"""T5X's `contrib.moe.models`: models of networks with experts."""

from rosetta_t5.compat.moe.models import MoeDecoderOnlyModel, MoeEncoderDecoderModel
