"""The functions that gin files calculate with, called from gin files."""

from __future__ import annotations

import pytest

RUN = """
from t5x import gin_utils
train_script.train:
  model = @{0}()
  model_dir = '/run'
  total_steps = 3
"""


@pytest.mark.parametrize(
  ("name", "bindings", "value"),
  [
    ("gin_utils.sum_fn", ["gin_utils.sum_fn.var1 = 2", "sum_fn.var2 = 3"], 5),
    ("gin_utils.bool_fn", ["bool_fn.var1 = 'x'"], True),
    ("gin_utils.bool_fn", ["bool_fn.var1 = 0"], False),
    ("gin_utils.string_split_fn", ["string_split_fn.text = 'a/b/c'"], ["a", "b", "c"]),
    (
      "gin_utils.string_split_fn",
      ["string_split_fn.text = 'a/b/c'", "string_split_fn.maxsplit = 1"],
      ["a", "b/c"],
    ),
    (
      "gin_utils.string_split_fn",
      ["string_split_fn.text = 'a/b/c'", "string_split_fn.index = -1"],
      "c",
    ),
  ],
)
def test_functions_give_their_value_in_a_gin_file(run, name, bindings, value):
  separator = ["gin_utils.string_split_fn.separator = '/'"]
  assert run(RUN.format(name), *bindings, *separator)["model"] == value


def test_open_arguments_are_told_before_the_run(run):
  with pytest.raises(ValueError, match=r"gin_utils\.sum_fn needs var2"):
    run(RUN.format("gin_utils.sum_fn"), "sum_fn.var1 = 1")
