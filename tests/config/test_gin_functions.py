"""The functions that calculate values inside gin files."""

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
def test_functions_return_their_value_in_a_gin_file(run, name, bindings, value):
  separator = ["gin_utils.string_split_fn.separator = '/'"]
  assert run(RUN.format(name), *bindings, *separator)["model"] == value


def test_missing_arguments_are_reported_before_the_run(run):
  with pytest.raises(ValueError, match=r"gin_utils\.sum_fn needs var2"):
    run(RUN.format("gin_utils.sum_fn"), "sum_fn.var1 = 1")


IN_SAMPLES = """
from t5x import gin_utils
BATCH_SIZE = 128
train_script.train:
  model = %BATCH_SIZE
  model_dir = '/run'
  total_steps = @total/gin_utils.steps_of()
  dataset_cfg = @period/gin_utils.steps_of()
total/gin_utils.steps_of.samples = 1e6
period/gin_utils.steps_of.samples = 12800
"""


def test_numbers_of_samples_become_steps_of_the_final_batch_size(run):
  assert [run(IN_SAMPLES)[name] for name in ("total_steps", "dataset_cfg")] == [7812, 100]
  larger = run(IN_SAMPLES, "BATCH_SIZE = 256", "period/gin_utils.steps_of.batch_size = 100")
  assert [larger[name] for name in ("total_steps", "dataset_cfg")] == [3906, 128]


@pytest.mark.parametrize("samples", ["127", "0", "-1", "1000.5", "1e400"])
def test_samples_that_make_less_than_one_step_are_refused(run, samples):
  with pytest.raises(
    ValueError,
    match=r"total/gin_utils.steps_of.samples must be an integer of at least 128 \(one batch\), got ",
  ):
    run(IN_SAMPLES, f"total/gin_utils.steps_of.samples = {samples}")


@pytest.mark.parametrize("batch_size", ["None", "'8x'", "0", "8.7"])
def test_samples_need_a_batch_size(run, batch_size):
  line = f"BATCH_SIZE = {batch_size}" if batch_size != "None" else ""
  text = IN_SAMPLES.replace("BATCH_SIZE = 128", line).replace("%BATCH_SIZE", "1")
  error = rf"BATCH_SIZE or total/\S+\.batch_size must be a positive integer, got {batch_size}"
  with pytest.raises(ValueError, match=error):
    run(text)


def test_a_function_without_parentheses_is_refused_where_its_value_is_needed(run):
  text = (
    r"^train.total_steps must be an integer, got @total/[\w.]+: write @total/[\w.]+\(\)\n"
    r"  run.gin, line \d+:[^\n]*$"
  )
  with pytest.raises(ValueError, match=text):
    run(IN_SAMPLES.replace("@total/gin_utils.steps_of()", "@total/gin_utils.steps_of"))


@pytest.mark.parametrize(
  ("steps", "text"),
  [
    ("1e6", "TRAIN_STEPS must be an integer, got 1000000.0: write 1000000\n"),
    ("2.5", "TRAIN_STEPS must be an integer, got 2.5\n"),
    ("'10'", "TRAIN_STEPS must be an integer, got '10': write 10\n"),
  ],
)
def test_steps_that_are_not_an_integer_are_reported_before_the_run(run, steps, text):
  with pytest.raises(ValueError, match=text):
    run(
      f"TRAIN_STEPS = {steps}\n" + RUN.format("gin_utils.bool_fn").replace("3", "%TRAIN_STEPS"),
      "bool_fn.var1 = 1",
    )
