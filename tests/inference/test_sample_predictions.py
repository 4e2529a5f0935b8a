"""Samples of predictions: where they come from, and how they are shown."""

from __future__ import annotations

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import (
  DECODER_ONLY,
  decoder_only_params,
  make_batch,
  make_decoder_only_model,
  make_model,
  pack,
  variables,
)

from rosetta_t5.inference.sample_predictions import Sample, SampleLog, held_out_sampler
from rosetta_t5.parallel import PjitPartitioner


class NumberVocabulary:
  """Tokens are written as numbers."""

  eos_id = 1

  def decode(self, tokens):
    return " ".join(map(str, tokens))


def sampler(model, params, rows):
  """Returns what the sampler predicts for rows of one task, with these parameters on 8 devices."""
  model._input_vocabulary = model._output_vocabulary = NumberVocabulary()
  replicated = jax.tree.map(lambda _: jax.sharding.PartitionSpec(), params)
  axes, state = types.SimpleNamespace(params=replicated), types.SimpleNamespace(params=params)
  return held_out_sampler({"numbers": rows}, model, PjitPartitioner(num_partitions=1), axes)(state)


def rows_of(batch):
  arrays = {name: np.asarray(x) for name, x in batch.items()}
  return [
    {name: x[row] for name, x in arrays.items()}
    for row in range(len(arrays["decoder_input_tokens"]))
  ]


def as_text(tokens):
  return NumberVocabulary().decode([int(x) for x in tokens if x > 1])


@pytest.mark.slow
def test_the_first_example_of_a_packed_row_is_predicted_as_if_it_were_alone():
  model, batch = make_model(), make_batch(2)
  params = variables(model.module)["params"]
  expected = jax.jit(model.predict_batch)(params, batch)
  (sample,) = sampler(model, params, rows_of(pack(batch)))
  first = [as_text(x[0]) for x in (batch["encoder_input_tokens"], batch["decoder_target_tokens"])]
  assert sample == Sample("numbers", *first, sample.prediction)
  # A packed row has room for more tokens than a row of its own.
  assert f"{sample.prediction} ".startswith(f"{as_text(expected[0])} ")


@pytest.mark.slow
def test_empty_rows_are_left_out():
  model, rows = make_model(), rows_of(make_batch(1))
  empty = {name: np.zeros_like(x) for name, x in rows[0].items()}
  assert len(sampler(model, variables(model.module)["params"], [*rows, empty])) == 1


@pytest.mark.slow
def test_a_language_model_continues_the_first_half_of_a_text():
  tokens = np.arange(2, 10, dtype=np.int32)
  row = {
    "decoder_target_tokens": np.pad(tokens, (0, 2)),
    "decoder_input_tokens": np.pad(tokens, (1, 1)),
    "decoder_loss_weights": np.pad(np.ones_like(tokens), (0, 2)),
  }
  params, model = decoder_only_params(DECODER_ONLY), make_decoder_only_model()
  prompt = {name: jnp.asarray(x)[None] for name, x in row.items()}
  prompt["decoder_causal_attention"] = jnp.asarray([[1] * 5 + [0] * 5])
  expected = jax.jit(model.predict_batch)(params, prompt)
  (sample,) = sampler(model, params, [row])
  assert sample == Sample("numbers", "2 3 4 5", "6 7 8 9", as_text(expected[0]))


def test_samples_are_shown_on_the_console_and_in_a_file(tmp_path, capsys):
  log = SampleLog(2, str(tmp_path))
  text = "a | *b* <script>\n# \\c &amp; _d_ [e](f) ü \udc80"
  log.write(7, lambda number: [Sample("t", text, "y" * 200, str(number))])
  log.write(8, lambda number: [Sample("t", "a", "b", "c")] * 9)
  lines = capsys.readouterr().out.splitlines()
  assert lines[:4] == [
    "samples at step 7  t",
    "  input      a | *b* <script> # \\c &amp; _d_ [e](f) ü",
    f"  target     {'y' * 106}…",
    "  prediction 2",
  ]
  assert len(lines) == 4 + 1 + 3 * 3
  records = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
  assert records[0] == {
    "step": 7,
    "task": "t",
    "input": text,
    "target": "y" * 200,
    "prediction": "2",
  }
  assert [record["step"] for record in records] == [7] + [8] * 9


def test_a_model_that_cannot_predict_is_reported_once_and_the_run_goes_on(tmp_path, capsys):
  calls = []

  def fail(number):
    calls.append(number)
    raise NotImplementedError("this model only scores\nand more")

  log = SampleLog(3, str(tmp_path))
  log.write(0, fail)
  log.write(1, fail)
  assert calls == [3]
  assert capsys.readouterr().out == (
    "note     this run shows no sample predictions: NotImplementedError: this model only scores\n"
  )
  assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_reported_and_the_samples_are_shown(
  tmp_path, caplog, capsys
):
  (tmp_path / "samples.jsonl").mkdir()
  SampleLog(1, str(tmp_path)).write(7, lambda number: [Sample("t", "a", "b", "c")])
  assert "samples.jsonl cannot be written" in caplog.text
  assert capsys.readouterr().out.endswith("  prediction c\n")
