"""Preparing data: its files, calls that are killed and repeated, bad input, and damaged shards."""

from __future__ import annotations

import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
import sentencepiece
from inline_executor import InlineExecutor

from rosetta_t5.data.prepared import TokenStream, prepare, shards
from rosetta_t5.data.prepared.shards import TOKENS_PER_RECORD
from rosetta_t5.data.vocabularies.sentencepiece_models import train_sentencepiece
from rosetta_t5.files import exclusive_output

WORDS = ("red", "old", "cat", "hat", "sea", "sun")


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> str:
  path = tmp_path_factory.mktemp("vocabulary") / "pieces.model"
  path.write_bytes(train_sentencepiece([" ".join(WORDS)] * 20, vocab_size=18))
  return str(path)


@pytest.fixture
def corpus(tmp_path: pathlib.Path) -> list[str]:
  """Four files of 50 documents, of 1 to 40 words."""
  random = np.random.default_rng(0)
  (tmp_path / "in").mkdir()
  documents = [" ".join(random.choice(WORDS, size)) for size in random.integers(1, 40, 200)]
  for number in range(4):
    lines = [json.dumps({"text": d}) + "\n" for d in documents[number * 50 : number * 50 + 50]]
    (tmp_path / f"in/{number}.jsonl").write_text("".join(lines))
  return documents


def files(folder: pathlib.Path) -> dict[str, bytes]:
  return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def run(tmp_path: pathlib.Path, vocabulary: str, **options: Any) -> dict[str, Any]:
  options = {"executor": InlineExecutor(), **options}
  out = options.pop("out", tmp_path / "out")
  return prepare(str(tmp_path / "in/*.jsonl"), vocabulary, out, **options)


def test_the_tokens_are_the_documents_and_the_manifest_counts_them(
  tmp_path: pathlib.Path, vocabulary: str, corpus: list[str]
) -> None:
  manifest = run(tmp_path, vocabulary, validation_percent=20)
  tokenizer = sentencepiece.SentencePieceProcessor(model_file=vocabulary)
  pieces = {}
  for split in ("train", "validation"):
    stream = TokenStream(tmp_path / "out", split)
    assert manifest["splits"][split]["tokens"] == stream.size
    pieces[split] = tokenizer.decode(stream.read([0], stream.size)[0].tolist())
  counts = {split: manifest["splits"][split]["documents"] for split in pieces}
  assert sum(counts.values()) == 200
  assert 20 <= counts["validation"] <= 65
  assert len(" ".join(pieces.values()).split()) == len(" ".join(corpus).split())


def test_any_part_of_the_stream_is_read_across_records_and_shards(
  tmp_path: pathlib.Path, vocabulary: str
) -> None:
  random = np.random.default_rng(0)
  (tmp_path / "in").mkdir()
  texts = [" ".join(random.choice(WORDS, 6000)) for _ in range(3)]
  for number, text in enumerate(texts):
    (tmp_path / f"in/{number}.jsonl").write_text(json.dumps({"text": text}))
  run(tmp_path, vocabulary, validation_percent=0)
  stream = TokenStream(tmp_path / "out", "train")
  whole = stream.read([0], stream.size)[0]
  encode = sentencepiece.SentencePieceProcessor(model_file=vocabulary).encode
  documents = [encode(text) for text in texts]
  assert whole.tolist() == [token for document in documents for token in document]
  record, shard = TOKENS_PER_RECORD, len(documents[0])
  assert shard > record
  starts = [0, 1, record - 25, record, shard - 25, shard, shard + record - 1, stream.size - 50]
  for row, start in zip(stream.read(starts, 50), starts, strict=True):
    np.testing.assert_array_equal(row, whole[start : start + 50])


def test_a_document_of_more_than_a_million_characters_keeps_its_tokens(
  tmp_path: pathlib.Path, vocabulary: str
) -> None:
  text = " ".join(np.random.default_rng(1).choice(WORDS, 300_000))
  assert len(text) > 1_000_000
  (tmp_path / "in").mkdir()
  (tmp_path / "in/a.jsonl").write_text(json.dumps({"text": text}))
  manifest = run(tmp_path, vocabulary, validation_percent=0, append_end=True)
  expected = sentencepiece.SentencePieceProcessor(model_file=vocabulary).encode(text)
  stream = TokenStream(tmp_path / "out", "train")
  np.testing.assert_array_equal(stream.read([0], stream.size)[0], [*expected, 1])
  assert manifest["splits"]["train"]["documents"] == 1


def test_a_killed_run_leaves_no_manifest_and_the_next_one_makes_the_remaining_shards(
  tmp_path: pathlib.Path, vocabulary: str, corpus: list[str]
) -> None:
  run(tmp_path, vocabulary, out=tmp_path / "unbroken")
  with pytest.raises(KeyboardInterrupt):
    run(tmp_path, vocabulary, executor=InlineExecutor(stop_after=2))
  with pytest.raises(ValueError, match=r"There is no .*manifest\.json: .* not completed"):
    TokenStream(tmp_path / "out", "train")
  half = tmp_path / "out" / ".train-00003-of-00004.array_record.1"
  half.write_bytes(b"leftover of a killed worker")
  executor = InlineExecutor()
  run(tmp_path, vocabulary, executor=executor)
  assert executor.ran == 2
  assert files(tmp_path / "out") == files(tmp_path / "unbroken")


def test_a_second_run_does_nothing_and_a_changed_file_is_prepared_again(
  tmp_path: pathlib.Path, vocabulary: str, corpus: list[str]
) -> None:
  first = run(tmp_path, vocabulary)
  executor = InlineExecutor()
  assert run(tmp_path, vocabulary, executor=executor) == first
  assert executor.ran == 0
  path = tmp_path / "in/2.jsonl"
  path.write_text(path.read_text().replace("red", "sun"))
  run(tmp_path, vocabulary, executor=executor)
  assert executor.ran == 1


def test_a_complete_folder_is_not_replaced_by_one_with_other_tokens(
  tmp_path: pathlib.Path, vocabulary: str, corpus: list[str]
) -> None:
  run(tmp_path, vocabulary)
  before = files(tmp_path / "out")
  other = tmp_path / "other.model"
  other.write_bytes(train_sentencepiece([" ".join(WORDS)] * 20, vocab_size=17))
  with pytest.raises(
    ValueError, match=r"out was prepared with .*'vocabulary_sha256'.*: set --out to"
  ):
    run(tmp_path, str(other))
  with pytest.raises(ValueError, match=r"'append_end': False, .* got .*'append_end': True"):
    run(tmp_path, vocabulary, append_end=True)
  assert files(tmp_path / "out") == before


def test_a_killed_run_after_a_change_leaves_no_outdated_manifest(
  tmp_path: pathlib.Path, vocabulary: str, corpus: list[str]
) -> None:
  run(tmp_path, vocabulary)
  path = tmp_path / "in/2.jsonl"
  path.write_text(path.read_text().replace("red", "sun"))
  with pytest.raises(KeyboardInterrupt):
    run(tmp_path, vocabulary, executor=InlineExecutor(stop_after=0))
  with pytest.raises(ValueError, match="not completed"):
    TokenStream(tmp_path / "out", "train")


def test_a_damaged_shard_is_refused_and_repaired_by_the_same_command(
  tmp_path: pathlib.Path, vocabulary: str, corpus: list[str]
) -> None:
  run(tmp_path, vocabulary)
  shard = tmp_path / "out/train-00001-of-00004.array_record"
  whole = shard.read_bytes()
  shard.write_bytes(whole[:-10])
  with pytest.raises(ValueError, match=r"train-00001.*damaged \(\d+ bytes instead of \d+\)"):
    TokenStream(tmp_path / "out", "train")
  executor = InlineExecutor()
  run(tmp_path, vocabulary, executor=executor)
  assert executor.ran == 1
  assert shard.read_bytes() == whole


def test_a_folder_of_an_older_version_is_refused_and_prepared_again_by_the_same_command(
  tmp_path: pathlib.Path, vocabulary: str, corpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
  run(tmp_path, vocabulary)
  before = files(tmp_path / "out")
  with monkeypatch.context() as older:
    older.setattr(shards, "FORMAT", 1)
    older.setattr(shards, "TOKENS_PER_RECORD", 16)
    shutil.rmtree(tmp_path / "out")
    run(tmp_path, vocabulary)
  with pytest.raises(ValueError, match=r"must have the format 2, got 1: prepare the folder again"):
    TokenStream(tmp_path / "out", "train")
  run(tmp_path, vocabulary)
  assert files(tmp_path / "out") == before


def test_a_manifest_that_is_not_that_of_the_checksums_is_written_again(
  tmp_path: pathlib.Path, vocabulary: str, corpus: list[str]
) -> None:
  run(tmp_path, vocabulary)
  before = files(tmp_path / "out")
  (tmp_path / "out/manifest.json").write_text("{")
  run(tmp_path, vocabulary)
  assert files(tmp_path / "out") == before


def test_bad_examples_are_in_the_manifest(
  tmp_path: pathlib.Path, vocabulary: str, corpus: list[str]
) -> None:
  with open(tmp_path / "in/2.jsonl", "a") as file:
    file.write('{"text": ""}\n{"body": 1}\n')
  manifest = run(tmp_path, vocabulary)
  assert sum(manifest["bad_examples"].values()) == 2
  assert "2.jsonl, line 51" in manifest["first_bad_example"]


def test_input_without_training_documents_is_refused_with_counts(
  tmp_path: pathlib.Path, vocabulary: str
) -> None:
  (tmp_path / "in").mkdir()
  (tmp_path / "in/a.jsonl").write_text("")
  with pytest.raises(ValueError, match=r"no document for training \(0 for"):
    run(tmp_path, vocabulary)


def test_a_vocabulary_that_is_not_a_sentencepiece_model_is_refused(
  tmp_path: pathlib.Path, corpus: list[str]
) -> None:
  (tmp_path / "notes.txt").write_text("not a model")
  with pytest.raises(ValueError, match=r"notes\.txt is not a SentencePiece model"):
    run(tmp_path, str(tmp_path / "notes.txt"))
  assert not (tmp_path / "out").exists()


def test_a_folder_with_foreign_files_is_refused(
  tmp_path: pathlib.Path, vocabulary: str, corpus: list[str]
) -> None:
  (tmp_path / "out").mkdir()
  (tmp_path / "out/thesis.tex").write_text("mine")
  with pytest.raises(ValueError, match=r"out contains other files: set --out"):
    run(tmp_path, vocabulary)
  assert os.listdir(tmp_path / "out") == ["thesis.tex"]


@pytest.mark.parametrize("name", ["manifest.json", "train-00000-of-00004.array_record"])
def test_what_a_killed_call_left_of_any_file_is_removed(
  tmp_path: pathlib.Path, vocabulary: str, corpus: list[str], name: str
) -> None:
  run(tmp_path, vocabulary)
  before = files(tmp_path / "out")
  (tmp_path / f"out/.{name}.123").write_text("half of the file")
  run(tmp_path, vocabulary)
  assert files(tmp_path / "out") == before


def test_a_folder_inside_that_of_the_input_is_no_input_of_the_next_call(
  tmp_path: pathlib.Path, vocabulary: str, corpus: list[str]
) -> None:
  first = prepare(str(tmp_path / "in"), vocabulary, tmp_path / "in/out", executor=InlineExecutor())
  executor = InlineExecutor()
  assert prepare(str(tmp_path / "in"), vocabulary, tmp_path / "in/out", executor=executor) == first
  assert executor.ran == 0
  with pytest.raises(ValueError, match=r"--input contains no file outside --out .*in/out"):
    prepare(str(tmp_path / "in/out"), vocabulary, tmp_path / "in/out", executor=executor)


def test_an_end_token_that_the_vocabulary_lacks_is_refused(
  tmp_path: pathlib.Path, corpus: list[str]
) -> None:
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter([" ".join(WORDS)] * 20), model_writer=model, vocab_size=16, eos_id=-1
  )
  (tmp_path / "no_end.model").write_bytes(model.getvalue())
  with pytest.raises(ValueError, match=r"no_end\.model has no end token.*--append-eos"):
    run(tmp_path, str(tmp_path / "no_end.model"), append_end=True)
  assert not (tmp_path / "out").exists()


def test_a_second_call_for_the_same_folder_is_refused(
  tmp_path: pathlib.Path, vocabulary: str, corpus: list[str]
) -> None:
  (tmp_path / "out").mkdir()
  with exclusive_output(tmp_path / "out"), pytest.raises(ValueError, match="another process is"):
    run(tmp_path, vocabulary)


@pytest.mark.parametrize("content", ["[]", '{"splits": []}', '{"splits": {"train": null}}'])
def test_a_shard_whose_summary_is_damaged_is_prepared_again(
  tmp_path: pathlib.Path, vocabulary: str, corpus: list[str], content: str
) -> None:
  first = run(tmp_path, vocabulary)
  (tmp_path / "out/shards/00002.json").write_text(content)
  executor = InlineExecutor()
  assert run(tmp_path, vocabulary, executor=executor)["splits"] == first["splits"]
  assert executor.ran == 1


@pytest.mark.slow
def test_a_pool_of_processes_writes_the_same_files(
  tmp_path: pathlib.Path, vocabulary: str, corpus: list[str]
) -> None:
  run(tmp_path, vocabulary, out=tmp_path / "here")
  run(tmp_path, vocabulary, executor=None, workers=2)
  assert files(tmp_path / "out") == files(tmp_path / "here")


@pytest.mark.slow
def test_after_sigkill_the_same_command_writes_the_same_files(
  tmp_path: pathlib.Path, vocabulary: str, corpus: list[str]
) -> None:
  for number in range(4):  # These are 9 MB, so that the process is killed before it is done.
    path = tmp_path / f"in/{number}.jsonl"
    path.write_text(path.read_text() * 400)
  run(tmp_path, vocabulary, out=tmp_path / "here")
  out = tmp_path / "out"
  options = ["--input", str(tmp_path / "in/*.jsonl"), "--vocab", vocabulary, "--workers", "1"]
  command = [sys.executable, "-m", "rosetta_t5.cli", "prepare", *options, "--out", str(out)]
  with subprocess.Popen(command, start_new_session=True) as process:
    while not list(out.glob("shards/*.json")):
      assert process.poll() is None
      time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
  assert not (out / "manifest.json").exists()
  assert subprocess.run(command, check=False).returncode == 0
  assert files(out) == files(tmp_path / "here")


@pytest.mark.slow
def test_an_incomplete_shard_never_counts_as_complete_whenever_the_command_is_killed(
  tmp_path: pathlib.Path, vocabulary: str, corpus: list[str]
) -> None:
  for number in range(4):
    path = tmp_path / f"in/{number}.jsonl"
    path.write_text(path.read_text() * 300)
  unkilled = run(tmp_path, vocabulary, out=tmp_path / "here")
  digests = {
    shard["file"]: shard["sha256_of_tokens"]
    for split in unkilled["splits"].values()
    for shard in split["shards"]
  }
  out = tmp_path / "out"
  options = ["--input", str(tmp_path / "in/*.jsonl"), "--vocab", vocabulary, "--workers", "2"]
  command = [sys.executable, "-m", "rosetta_t5.cli", "prepare", *options, "--out", str(out)]
  random = np.random.default_rng(0)
  kills = 0
  for longest in range(8):
    with subprocess.Popen(command, start_new_session=True) as process:
      deadline = time.monotonic() + 120
      while process.poll() is None and not list(out.glob(".*.array_record.*")):
        assert time.monotonic() < deadline
        time.sleep(0.002)  # Waits until a worker writes.
      time.sleep(random.uniform(0, 0.1 + 0.05 * longest))
      if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        kills += 1
    # A shard that counts as complete is complete.
    for summary in out.glob("shards/*.json"):
      for shard in json.loads(summary.read_text())["splits"].values():
        assert (out / shard["file"]).read_bytes() == (
          tmp_path / "here" / shard["file"]
        ).read_bytes()
        assert shard["sha256_of_tokens"] == digests[shard["file"]]
  assert kills >= 3
  assert subprocess.run(command, check=False).returncode == 0
  assert files(out) == files(tmp_path / "here")


@pytest.mark.slow
def test_a_dask_cluster_writes_the_same_files(
  tmp_path: pathlib.Path, vocabulary: str, corpus: list[str]
) -> None:
  distributed = pytest.importorskip("distributed")
  run(tmp_path, vocabulary, out=tmp_path / "here")
  with (
    distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
    distributed.Client(cluster) as client,
  ):
    run(tmp_path, vocabulary, executor=client.get_executor())
  assert files(tmp_path / "out") == files(tmp_path / "here")
