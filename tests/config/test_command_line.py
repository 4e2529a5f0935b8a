"""T5X's flags, and the errors of flags that do not exist."""

from __future__ import annotations

import pytest

from rosetta_t5.config.command_line import CommandLine, parse_command_line, rewrite_gin_args, usage
from rosetta_t5.user_errors import ConfigError


def _parse(*arguments: str) -> CommandLine:
  return parse_command_line(["train", *arguments])


def test_without_flags_all_values_are_defaults():
  given = _parse()
  assert (given.gin_file, given.gin_bindings, given.gin_search_paths) == ([], [], ["."])
  assert not given.multiprocess_gpu
  assert given.process_index is None


def test_t5x_flags_are_parsed():
  given = _parse(
    "--gin_file=a.gin",
    "--gin_file",
    "b.gin",
    "--gin_search_paths=.,/configs",
    "--gin_bindings=A = 1",
    "--gin.B=2",
    "--tfds_data_dir=/tfds",
    "--seqio_additional_cache_dirs=/c1,/c2",
    "--multiprocess_gpu",
    "--coordinator_address=10.0.0.1:12345",
    "--process_count=4",
    "--process_index=0",
    "--initialization_timeout=60",
    "--alsologtostderr",
  )
  assert given.gin_file == ["a.gin", "b.gin"]
  assert given.gin_search_paths == [".", "/configs"]
  assert given.gin_bindings == ["A = 1", "B = 2"]
  assert given.tfds_data_dir == "/tfds"
  assert given.seqio_additional_cache_dirs == ["/c1", "/c2"]
  assert given.multiprocess_gpu
  assert given.coordinator_address == "10.0.0.1:12345"
  assert (given.process_count, given.process_index, given.initialization_timeout) == (4, 0, 60)


def test_a_second_command_line_starts_from_the_defaults():
  _parse("--gin_file=a.gin", "--process_index=3")
  assert _parse("--gin_file=b.gin").gin_file == ["b.gin"]
  assert _parse().process_index is None


@pytest.mark.parametrize(
  ("flag", "statement"),
  [
    ("--gin.value=3", "value = 3"),
    ("--gin.text='a'", "text = 'a'"),
    ('--gin.tricky="key = value"', 'tricky = "key = value"'),
    ("--gin.dict={'a': 1, 'b': 'c'}", "dict = {'a': 1, 'b': 'c'}"),
    ("--gin.scope/part.name=bar", "scope/part.name = bar"),
  ],
)
def test_gin_flags_become_bindings(flag, statement):
  assert rewrite_gin_args([flag]) == [f"--gin_bindings={statement}"]


def test_other_arguments_are_unchanged():
  assert rewrite_gin_args(["gin.value=3", "--gin_file=x"]) == ["gin.value=3", "--gin_file=x"]


@pytest.mark.parametrize(
  ("arguments", "text"),
  [
    (["--lr=0.1"], " Set --gin.utils.create_learning_rate_scheduler.base_learning_rate=0.1\n"),
    (["--gin_fil=a.gin"], "Unknown command line flag 'gin_fil'. Did you mean: gin_file"),
    (["--process_count=two"], "process_count"),
    (["--gin.MODEL_DIR", "/x"], "of the form '--gin.<param>=<value>', got: --gin.MODEL_DIR"),
    (["gin.STEPS=1"], "unexpected argument 'gin.STEPS=1'. Did you mean --gin.STEPS=1?"),
    (["pretrain"], "unexpected argument 'pretrain'."),
  ],
)
def test_errors_name_the_argument(arguments, text):
  with pytest.raises(ConfigError) as caught:
    _parse(*arguments)
  assert text in str(caught.value)


def test_help_contains_each_flag_of_the_program():
  assert _parse("--help").help
  shown = usage("export")
  assert shown.startswith("usage: python -m t5x.export ")
  for flag in ("gin.NAME=VALUE", "gin_file", "tfds_data_dir", "process_index", "debug"):
    assert f"--{flag}" in shown
  assert "--run_mode" not in shown
  assert "--run_mode" in usage("main")
