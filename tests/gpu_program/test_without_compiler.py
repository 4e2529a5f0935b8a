"""`rosetta-t5 compile` where XLA's GPU compiler is not installed, and with wrong arguments."""

from __future__ import annotations

import importlib.util

import pytest

from rosetta_t5.cli import main

RECIPE = "gin/examples/small_pile_pretrain.gin"


@pytest.mark.skipif(
  importlib.util.find_spec("jax_cuda13_plugin") is not None, reason="the compiler is installed here"
)
def test_a_missing_compiler_is_one_sentence_with_what_to_install(capsys):
  with pytest.raises(SystemExit):
    main(["compile", RECIPE, "--devices", "8"])
  error = capsys.readouterr().err
  assert "XLA's GPU compiler is not installed in this environment" in error
  assert "pip install 'rosetta-t5[gpu]'" in error


@pytest.mark.parametrize(
  ("arguments", "text"),
  [
    (["--devices", "0"], "--devices: must be a positive integer, got '0'"),
    (["--devices", "8", "--gpu", "v100"], "argument --gpu: invalid choice: 'v100'"),
    (["--devices", "8", "--step", "tain"], "argument --step: invalid choice: 'tain'"),
    (["--devices", "8", "--json", "nowhere/x.json"], "the folder of nowhere/x.json does not exist"),
    (
      ["--devices", "8", "--mesh", "fsdp=8"],
      "argument --mesh: must be JSON such as '{\"fsdp\": 8}'",
    ),
    ([], "the following arguments are required: --devices"),
  ],
)
def test_wrong_arguments_are_errors_before_anything_compiles(arguments, text, capsys):
  with pytest.raises(SystemExit) as ended:
    main(["compile", RECIPE, *arguments])
  assert ended.value.code == 2
  assert text in capsys.readouterr().err
