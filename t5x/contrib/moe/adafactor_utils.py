"""T5X's `contrib.moe.adafactor_utils`: Adafactor's rules for experts."""

from rosetta_t5.training.optimizers.factor_rules import FactorDim, standard_logical_factor_rules


def logical_factor_rules() -> dict[str, FactorDim]:
  """Returns the roles of the logical axes of models with experts (T5X's rules)."""
  return {**standard_logical_factor_rules(), "mlp_embed": FactorDim.ROW}
