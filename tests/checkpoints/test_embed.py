"""`rosetta-t5 embed`: vectors that equal those of Transformers' encoders, its files, and mistakes."""

from __future__ import annotations

import json

import gin
import jax
import numpy as np
import pyarrow.parquet
import pytest
import transformers_texts
from transformers_embeddings import MODELS, TEXTS, VOCAB, recorded_vectors, write_folder

from rosetta_t5 import cli
from rosetta_t5.checkpoints import local_folder
from rosetta_t5.models import EncoderModel
from rosetta_t5.networks.config import T5Config
from rosetta_t5.networks.transformer import Transformer

CASES = [(name, pooling) for name in MODELS for pooling in ("mean", "first")]


@pytest.fixture(autouse=True)
def empty_gin(monkeypatch):
  monkeypatch.setattr("rosetta_t5.parallel.process_settings.enable_compilation_cache", lambda: None)
  yield
  gin.clear_config()


def embed(folder, *arguments):
  return cli.main(["embed", "--model_dir", str(folder), *map(str, arguments)])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pooling"), CASES)
def test_vectors_are_those_of_transformers_in_the_order_of_the_texts(name, pooling, tmp_path):
  write_folder(name, tmp_path / "model")
  (tmp_path / "texts").write_text("".join(f"{text}\n" for text in TEXTS))
  output = tmp_path / "vectors.npy"
  call = ["--input", tmp_path / "texts", "--output", output, "--batch_size", 8]
  # A folder's own pooling is its mean, and mean is the default without one.
  assert (
    embed(tmp_path / "model", *call, *([] if pooling == "mean" else ["--pooling", pooling])) == 0
  )
  vectors = np.load(output)
  assert vectors.dtype == np.float32
  np.testing.assert_allclose(vectors, recorded_vectors(name, pooling), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_vectors_of_a_trained_prompt_are_not_those_of_a_text(pooling):
  config = T5Config(vocab_size=VOCAB, emb_dim=16, num_encoder_layers=1, prompt_length=3)
  model = EncoderModel(Transformer(config), None, None, None)
  tokens = np.array([[5, 9, 4, 0], [7, 0, 0, 0]])
  params = model.get_initial_variables(jax.random.PRNGKey(0), {"encoder_input_tokens": (2, 4)})
  encode = Transformer.encode
  encoded = model.module.apply(params, tokens, enable_dropout=False, method=encode)[:, 3:]
  vectors = model.embed_batch(params["params"], {"encoder_input_tokens": tokens}, pooling)
  first, mean = encoded[:, 0], [encoded[0, :3].mean(0), encoded[1, 0]]
  np.testing.assert_allclose(vectors, first if pooling == "first" else mean, atol=1e-6)


@pytest.fixture
def folder(tmp_path):
  write_folder("encoder of t5", tmp_path / "model")
  return tmp_path / "model"


@pytest.mark.slow
def test_a_parquet_file_has_the_columns_of_the_rows_beside_the_vectors(folder, tmp_path):
  rows = [{"id": n, "words": text} for n, text in enumerate(TEXTS[:3])]
  rows[1]["note"] = "later"
  (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  call = ["--input", tmp_path / "rows.jsonl", "--template", "words"]
  assert embed(folder, *call, "--output", tmp_path / "out.parquet") == 0
  table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
  assert table.select(["id", "words"]).to_pylist() == [
    {name: row[name] for name in ("id", "words")} for row in rows
  ]
  assert table["note"].to_pylist() == [None, "later", None]
  found = np.array(table["embedding"].to_pylist())
  expected = recorded_vectors("encoder of t5", "mean")[:3]
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_vectors_of_tokens_have_the_mean_and_the_first_that_transformers_computes(folder, tmp_path):
  (tmp_path / "texts").write_text("".join(f"{text}\n" for text in TEXTS))
  output = tmp_path / "out.parquet"
  assert embed(folder, "--input", tmp_path / "texts", "--pooling", "none", "--output", output) == 0
  found = [np.array(x) for x in pyarrow.parquet.read_table(output)["embedding"].to_pylist()]
  for pooling, of_texts in (("mean", [x.mean(0) for x in found]), ("first", [x[0] for x in found])):
    expected = recorded_vectors("encoder of t5", pooling)
    np.testing.assert_allclose(of_texts, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_folders_own_length_limits_its_texts(tmp_path, capfd):
  write_folder("sentence-t5", tmp_path / "model")
  (tmp_path / "texts").write_text(" ".join(["w5"] * 22))
  assert (
    embed(tmp_path / "model", "--input", tmp_path / "texts", "--output", tmp_path / "a.npy") == 0
  )
  assert "1 inputs had more than 20 tokens" in capfd.readouterr().err


@pytest.mark.parametrize(
  ("content", "name", "arguments", "message"),
  [
    ("w5\n", "texts", ["--output", "out.txt"], "--output must end with .npy or .parquet"),
    ("w5\n", "texts", ["--output", "old.npy"], "old.npy exists"),
    ("w5\n", "texts", ["--pooling", "none"], "--output must end with .parquet"),
    ("", "texts", [], "contains no text"),
    ('{"a": "w5"}\n', "rows.jsonl", [], "have columns: give the model's input"),
    ('{"a": "w5"}\n', "rows.jsonl", ["--template", "b"], "no column 'b' among 'a'"),
    ('{"embedding": "w5"}\n', "rows.jsonl", ["--template", "embedding"], "rename it"),
  ],
)
def test_mistakes_are_reported_before_the_model_is_opened(
  content, name, arguments, message, tmp_path, monkeypatch, capfd
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / name).write_text(content)
  (tmp_path / "old.npy").write_text("")
  output = [] if "--output" in arguments else ["--output", "out.npy"]
  with pytest.raises((SystemExit, ValueError)) as error:
    embed("no_such_model", "--input", name, *output, *arguments)
  assert message in capfd.readouterr().err + str(error.value)


def test_a_folder_without_a_decoder_is_refused_by_infer_which_names_embed(folder, tmp_path, capfd):
  (tmp_path / "texts").write_text("w5\n")
  with pytest.raises((SystemExit, ValueError)) as error:
    cli.main(["infer", "--model_dir", str(folder), "--input", str(tmp_path / "texts")])
  assert "of which `rosetta-t5 embed` makes vectors" in capfd.readouterr().err + str(error.value)


def test_an_unknown_module_of_a_folder_is_refused(tmp_path, capfd):
  write_folder("sentence-t5", tmp_path / "model")
  file = tmp_path / "model/modules.json"
  file.write_text(file.read_text().replace("models.Dense", "models.LSTM"))
  (tmp_path / "texts").write_text("w5\n")
  with pytest.raises((SystemExit, ValueError)) as error:
    embed(tmp_path / "model", "--input", tmp_path / "texts", "--output", tmp_path / "a.npy")
  shown = capfd.readouterr().err + str(error.value)
  assert "the module must be one of 'Pooling', 'Dense', 'Normalize', got 'LSTM'" in shown
  assert not (tmp_path / "a.npy").exists()


def test_a_model_without_an_encoder_is_refused(tmp_path, capfd):
  transformers_texts.write_folder("5.24.0/gpt2", tmp_path / "model")
  (tmp_path / "texts").write_text("w5\n")
  with pytest.raises((SystemExit, ValueError)) as error:
    embed(tmp_path / "model", "--input", tmp_path / "texts", "--output", tmp_path / "a.npy")
  assert "has no encoder: give an encoder-decoder" in capfd.readouterr().err + str(error.value)


def test_the_modules_of_a_model_on_the_hub_are_downloaded_too(tmp_path, monkeypatch):
  write_folder("sentence-t5", tmp_path / "model")
  patterns = []

  def download(name, allow_patterns, ignore_patterns):
    patterns.append((allow_patterns, ignore_patterns))
    return str(tmp_path / "model")

  monkeypatch.setattr("huggingface_hub.snapshot_download", download)
  assert local_folder("an-owner/sentence-t5") == str(tmp_path / "model")
  assert patterns[1:] == [(["[0-9]_*/config.json", "[0-9]_*/model.safetensors"], None)]
