"""Measures SeqIO's feed, the feed of prepared text, and the preparation.

  python -m benchmarks.feed --books 'books/*.md' --vocab spiece.model [--seconds 20] [--batch 128]

Both feeds do span corruption at 512/128 tokens on the same text, one after the other in one process.
CPU seconds are those of the whole process with all its threads; unlike wall-clock time, they do not
depend on the load of the machine.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

LENGTHS = {"inputs": 512, "targets": 128}


def measure(batches: Iterator[Any], rows: int, seconds: float) -> dict[str, float]:
  """Returns sequences and tokens per second, after three batches of warm-up."""
  for _ in range(3):
    next(batches)
  wall, cpu, count = time.perf_counter(), time.process_time(), 0
  while time.perf_counter() - wall < seconds:
    next(batches)
    count += 1
  wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
  return {
    "sequences_a_second": round(count * rows / wall, 1),
    "sequences_a_cpu_second": round(count * rows / cpu, 1),
    "input_tokens_a_second": round(count * rows * LENGTHS["inputs"] / wall),
  }


def documents(books: list[str]) -> list[str]:
  """Returns the books' text as documents of 6 kB, the average length in the Pile."""
  text = "\n\n".join(pathlib.Path(book).read_text() for book in books)
  return [text[start : start + 6000] for start in range(0, len(text), 6000)]


def tokenizer_ceiling(texts: list[str], model: str) -> float:
  """Returns the MB per CPU second of SentencePiece alone, on the same documents."""
  import sentencepiece

  tokenizer = sentencepiece.SentencePieceProcessor(model_file=model, num_threads=1)
  size = sum(len(text.encode()) for text in texts) / 1e6
  start = time.process_time()
  tokenizer.encode(texts, out_type=int)
  return size / (time.process_time() - start)


def job_speed(files: list[str], model: str, folder: str) -> float:
  """Returns the MB per CPU second of one process that prepares shards."""
  from concurrent.futures import Executor, Future

  from rosetta_t5.data.prepared import prepare
  from rosetta_t5.data.reading import read_records

  class InlineExecutor(Executor):
    """Runs jobs in the calling thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
      future: Future[Any] = Future()
      future.set_result(fn(*args, **kwargs))
      return future

  size = sum(len(fields["text"].encode()) for path in files for _, fields in read_records(path))
  start = time.process_time()
  prepare(files, model, folder, executor=InlineExecutor())
  return size / 1e6 / (time.process_time() - start)


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the benchmark and prints one JSON object."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--books", required=True)
  parser.add_argument("--vocab", required=True)
  parser.add_argument("--seconds", type=float, default=20)
  parser.add_argument("--batch", type=int, default=128)
  arguments = parser.parse_args(argv)
  texts = documents(sorted(glob.glob(arguments.books)))
  result: dict[str, Any] = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
  with tempfile.TemporaryDirectory() as folder:
    files = [f"{folder}/{number}.jsonl" for number in range(16)]
    for number, path in enumerate(files):
      lines = [json.dumps({"text": text}) + "\n" for text in texts[number::16]]
      pathlib.Path(path).write_text("".join(lines))
    job_speed(files[:1], arguments.vocab, folder + "/warm")
    result["prepare_MB_a_cpu_second"] = round(job_speed(files, arguments.vocab, folder + "/all"), 2)
    result["sentencepiece_MB_a_cpu_second"] = round(tokenizer_ceiling(texts, arguments.vocab), 2)
    result |= feeds(arguments, files, folder + "/all")
  print(json.dumps(result, indent=1))


def feeds(arguments: argparse.Namespace, files: list[str], folder: str) -> dict[str, Any]:
  """Returns the rates of both feeds."""
  from rosetta_t5.data import DatasetConfig, file_task, get_dataset, prepared_task
  from rosetta_t5.data.tensorflow_import import import_seqio

  def config(task: Any) -> DatasetConfig:
    return DatasetConfig(task, LENGTHS, "train", arguments.batch, shuffle=True, seed=0)

  prepared = get_dataset(config(prepared_task(folder)), 0, 1, None)
  result = {"prepared": measure(prepared, arguments.batch, arguments.seconds)}
  seqio = import_seqio()
  vocabulary = seqio.SentencePieceVocabulary(arguments.vocab, extra_ids=100)
  name = file_task(files, vocabulary=vocabulary)
  data = get_dataset(config(name), 0, 1, seqio.EncDecFeatureConverter)
  return result | {"seqio": measure(data.as_numpy_iterator(), arguments.batch, arguments.seconds)}


if __name__ == "__main__":
  main()
