"""Hugging Face folders are opened as models: their tokenizer, their generation settings, their texts."""

from __future__ import annotations

import json

import gin
import numpy as np
import pytest
import transformers_texts
from transformers_texts import PROMPTS, SETTINGS, write_folder

from rosetta_t5 import cli
from rosetta_t5.checkpoints import local_folder
from rosetta_t5.config import bindings_of
from rosetta_t5.config.hugging_face_recipe import hugging_face_recipe
from rosetta_t5.data.vocabularies.sentencepiece_models import sentinel_ids, train_sentencepiece
from rosetta_t5.data.vocabularies.task_vocabularies import same_vocabulary
from rosetta_t5.interactive import open_model
from rosetta_t5.trained_model import open_model_dir, read_run

RECORDED = json.loads(transformers_texts.RECORDINGS.read_text())
QUICK = {"5.24.0/t5": ("controls",), "4.57.6/gpt2": ("greedy",)}


@pytest.fixture(autouse=True)
def empty_gin(monkeypatch):
  monkeypatch.setattr("rosetta_t5.parallel.process_settings.enable_compilation_cache", lambda: None)
  yield
  gin.clear_config()


def infer(tmp_path, *options):
  """Returns what `rosetta-t5 infer` writes for the prompts with the folder tmp_path/model."""
  (tmp_path / "texts").write_text("\n".join(PROMPTS))
  output = tmp_path / "out.jsonl"
  arguments = ["--model_dir", tmp_path / "model", "--input", tmp_path / "texts", "--output", output]
  assert cli.main(["infer", *map(str, arguments), *options]) == 0
  return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("case", "setting"),
  [
    pytest.param(case, setting, marks=[] if setting in quick else pytest.mark.slow)
    for case in RECORDED
    for quick in [QUICK.get(case, ())]
    for setting in SETTINGS
    # Transformers penalizes the start token too, which is padding here.
    if setting != "controls" or not case.endswith(("gpt2", "gpt_neo", "t5-start"))
  ],
)
def test_infer_opens_a_folder_and_writes_what_transformers_generates(case, setting, tmp_path):
  write_folder(case, tmp_path / "model", setting)
  rows = infer(tmp_path)
  assert [row["prediction"] for row in rows] == RECORDED[case][setting]
  assert all(row["score"] < 0 for row in rows)


@pytest.mark.slow
def test_output_length_limits_what_a_decoder_adds_to_a_text(tmp_path, capsys):
  write_folder("4.57.6/gpt2", tmp_path / "model", "greedy")
  change(tmp_path / "model/generation_config.json", max_length=9)
  # With a binding, the folder is read a second time.
  rows = infer(tmp_path, "--output_length=3", "--gin.decoding.temperature_sample.topk=0")
  whole = RECORDED["4.57.6/gpt2"]["greedy"]
  assert [row["prediction"].split() for row in rows] == [text.split()[:3] for text in whole]
  assert capsys.readouterr().err.count("these have no effect: max_length = 9") == 1


@pytest.fixture
def folder(tmp_path):
  write_folder("5.24.0/t5", tmp_path / "model")
  return tmp_path / "model"


def change(file, **entries):
  file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | entries))


def text_of(folder):
  return hugging_face_recipe(folder)[0]


def test_sampling_beams_and_lengths_come_from_generation_config(folder, capsys):
  def decoding(**entries):
    change(folder / "generation_config.json", **entries)
    text, notes = hugging_face_recipe(folder)
    return [x for x in text.splitlines() if "decod" in x.split(" = ")[0].lower()][-7:], notes

  lines, notes = decoding(do_sample=True, temperature=0.7, top_k=20)
  assert {
    "decoding.temperature_sample.temperature = 0.7",
    "decoding.temperature_sample.topk = 20",
  } < {*lines}
  assert not notes
  lines, _ = decoding(top_p=0.9)
  assert {"decoding.temperature_sample.topp = 0.9", "decoding.temperature_sample.topk = 20"} < {
    *lines
  }
  lines, notes = decoding(num_beams=3, length_penalty=2.0, penalty_alpha=0.6, do_sample=False)
  assert "decoding.beam_search.alpha = 2.0" in lines
  assert "models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 3" in text_of(folder)
  assert "have no effect: penalty_alpha = 0.6" in notes[0]
  read_run(folder, used=["model"])
  assert capsys.readouterr().err.count(notes[0]) == 1
  run, restore_cfg = read_run(folder, ["--gin.decoding.beam_search.alpha=0.25"])
  assert bindings_of(run["model"].decode_fn)["alpha"] == 0.25  # flags change the recipe
  _, notes = decoding(do_sample=True, penalty_alpha=None)
  assert notes == ["in generation_config.json do_sample has no effect beside num_beams > 1"]
  assert run["task_feature_lengths"] == {"inputs": 512, "targets": transformers_texts.NEW_TOKENS}
  assert (restore_cfg.path, restore_cfg.mode) == (str(folder), "specific")


def test_the_folders_vocabulary_is_sentencepiece_unless_tokens_were_added(folder, capsys):
  model = train_sentencepiece([f"the number {n} is not {n * n}" for n in range(300)], 120)
  (folder / "tokenizer.json").rename(folder / "kept.json")
  (folder / "spiece.model").write_bytes(model)
  vocabulary = read_run(folder)[0]["model"].output_vocabulary
  assert (vocabulary.extra_ids, vocabulary.vocab_size) == (100, 220)
  (folder / "kept.json").rename(folder / "tokenizer.json")
  change(folder / "tokenizer_config.json", extra_ids=0)
  change(folder / "added_tokens.json", **{"<table>": 31})
  vocabulary = read_run(folder)[0]["model"].output_vocabulary
  assert vocabulary.decode(vocabulary.encode("w9 w4")) == "w9 w4"
  (folder / "tokenizer.json").unlink()
  assert hugging_face_recipe(folder)[1] == [
    "spiece.model lacks <table>: save the tokenizer as tokenizer.json too"
  ]
  (folder / "spiece.model").unlink()
  with pytest.raises(SystemExit):
    read_run(folder)
  assert "has no tokenizer: it must contain spiece.model" in capsys.readouterr().err


@pytest.mark.slow
def test_tokens_that_a_tokenizer_adds_get_rows_in_the_table(folder):
  from tokenizers import Tokenizer

  tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
  tokenizer.add_tokens(["new", "newer"])
  tokenizer.save(str(folder / "tokenizer.json"))
  text, notes = hugging_face_recipe(folder)
  assert "network.T5Config.vocab_size = 34" in text
  assert notes == ["the tokenizer has 2 tokens more than the table has rows"]
  opened = open_model_dir(folder)
  table = opened.state.params["token_embedder"]["embedding"]
  np.testing.assert_allclose(
    table[32:], np.repeat(table[:32].mean(0, keepdims=True), 2, 0), atol=1e-6
  )
  assert opened.model.input_vocabulary.encode("w9 new") == [9, 32]


def test_a_tokenizer_that_was_made_of_a_sentencepiece_model_is_the_same_vocabulary(tmp_path):
  import seqio
  from tokenizers import Tokenizer, models

  from rosetta_t5.data import tokenizer_vocabulary

  model = train_sentencepiece([f"the number {n} is not {n * n}" for n in range(300)], 120)
  (tmp_path / "spiece.model").write_bytes(model)
  pieces = seqio.SentencePieceVocabulary(str(tmp_path / "spiece.model"), extra_ids=2)
  names = [pieces.tokenizer.id_to_piece(n) for n in range(120)] + ["<extra_id_1>", "<extra_id_0>"]
  tokenizer = Tokenizer(models.Unigram([(name, 0.0) for name in names], 2, False))
  tokenizer.save(str(tmp_path / "tokenizer.json"))
  end = pieces.tokenizer.id_to_piece(pieces.eos_id)
  same = tokenizer_vocabulary(str(tmp_path / "tokenizer.json"), end)
  assert same_vocabulary(same, pieces)
  assert same_vocabulary(pieces, same)
  assert not same_vocabulary(tokenizer_vocabulary(str(tmp_path / "tokenizer.json"), end, 1), pieces)
  assert sentinel_ids(same) == sentinel_ids(pieces) == [121, 120]
  assert same.vocab_size == pieces.vocab_size


def test_a_hub_name_is_looked_up_only_where_no_folder_can_be_meant(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("HF_HUB_OFFLINE", "1")
  (tmp_path / "runs").mkdir()
  for path in ("runs/squad", "squad", "/a/b", "a/b/c", "gs://a/b", "./a"):
    assert local_folder(path) == path
  monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(tmp_path))
  assert local_folder("google/flan-t5-small") == str(tmp_path)

  def fail(name, **options):
    raise OSError("Cannot reach the hub\nmore")

  monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
  with pytest.raises(
    ValueError, match=r"Cannot reach the hub\. On a machine with a network, run: hf d"
  ):
    local_folder("google/flan-t5-small")


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["infer", "--split", "test", "--output_dir", "out"], "has no task of its own: give --task"),
    (
      ["eval", "--task", "lambada"],
      "is not in the folder of a run, where results go: give --output_dir",
    ),
  ],
)
def test_a_folder_needs_a_task_and_a_folder_for_results(folder, arguments, message, capsys):
  with pytest.raises(SystemExit):
    cli.main([*arguments, "--model_dir", str(folder)])
  assert message in capsys.readouterr().err


@pytest.mark.slow
def test_an_interactive_model_continues_texts_as_infer_does(tmp_path):
  write_folder("4.57.6/gpt2", tmp_path / "model", "greedy")
  lengths = {"inputs": 8, "targets": transformers_texts.NEW_TOKENS}
  model = open_model(tmp_path / "model", str(tmp_path / "out"), 8, lengths, add_eos=False)
  texts = [text.decode() for _, text in model.predict_with_aux(PROMPTS)[0]]
  assert texts == RECORDED["4.57.6/gpt2"]["greedy"]


@pytest.mark.slow
def test_an_interactive_model_opens_a_folder_and_trains_it(folder, tmp_path):
  lengths = {"inputs": 8, "targets": transformers_texts.NEW_TOKENS}
  model = open_model(folder, str(tmp_path / "out"), 8, lengths)
  predictions, _ = model.predict_with_aux(PROMPTS)
  texts = [text.decode() for _, text in predictions]
  assert texts == [text.strip() for text in RECORDED["5.24.0/t5"]["greedy"]]
  model.train_step([{"input": "w9 w4", "target": "w5"}] * 8)
  assert model.step == 1
  assert model.train_summary["loss"].value > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", transformers_texts.CASES)
def test_greedy_texts_equal_those_of_the_installed_transformers(case, tmp_path):
  pytest.importorskip("transformers")
  write_folder(f"5.24.0/{case}", tmp_path / "model")
  expected = transformers_texts.texts_of_transformers(tmp_path / "model")
  assert [row["prediction"] for row in infer(tmp_path)] == expected
