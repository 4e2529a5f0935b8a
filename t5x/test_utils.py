"""T5X's `test_utils`: fakes for the tests of programs written for T5X."""

from rosetta_t5.compat.fakes import (
  CpuDevice,
  TpuDevice,
  assert_equal,
  assert_same,
  get_fake_tokenized_dataset,
  get_fake_vocab,
  get_t5_test_model,
  get_train_state_from_variables,
  make_devices,
)
