"""T5X's `contrib.moe.models`: models of networks with experts."""

from rosetta_t5.models import DecoderOnlyModel, EncoderDecoderModel


class MoeEncoderDecoderModel(EncoderDecoderModel):
  """An encoder-decoder model whose network sows the losses of its experts (T5X).

  `EncoderDecoderModel` is enough for the networks of this project, whose config has `num_experts`. The
  loss of this class raises ValueError if no layer has sown the losses.
  """

  has_experts = True  # The losses that layers sow are required.


class MoeDecoderOnlyModel(DecoderOnlyModel):
  """A decoder-only model whose network sows the losses of its experts (T5X)."""

  has_experts = True
