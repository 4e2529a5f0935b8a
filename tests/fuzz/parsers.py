"""The parsers of files that others wrote, each with intact files and a function that reads them."""

from __future__ import annotations

import bz2
import dataclasses
import functools
import gzip
import json
import lzma
import pathlib
import shutil
from collections.abc import Callable, Mapping

import numpy as np
import pyarrow
from etils import epath
from inline_executor import InlineExecutor
from mutations import JSON, MSGPACK, RECORDS, SAFETENSORS, Structure
from pyarrow import parquet
from run_files import add_event_file, write_run
from safetensors.numpy import save_file
from tokenizers.pre_tokenizers import ByteLevel

from rosetta_t5.checkpoints.arrays.lazy_arrays import as_stored_array
from rosetta_t5.checkpoints.checkpoint_folders import read_arrays, read_run_facts
from rosetta_t5.checkpoints.formats import t5x_layouts
from rosetta_t5.checkpoints.formats.hugging_face.name_tables import PADDING_IS_TOKEN_0
from rosetta_t5.checkpoints.formats.hugging_face.tokenizer_files import complete_tokenizer
from rosetta_t5.config.language.statements import read_program
from rosetta_t5.config.model_file import read_model_file
from rosetta_t5.conversion.model_settings import read_model_settings
from rosetta_t5.data.dataset_config import DatasetConfig
from rosetta_t5.data.pipeline.inference_data import InferenceData
from rosetta_t5.data.prepared import TokenStream, prepare
from rosetta_t5.data.reading import read_records
from rosetta_t5.data.tasks.file_task import create_task_from_tfexample_file
from rosetta_t5.data.tensorflow_import import import_seqio, import_tensorflow
from rosetta_t5.data.vocabularies.sentencepiece_models import (
  load_sentencepiece,
  train_sentencepiece,
)
from rosetta_t5.data.vocabularies.task_vocabularies import (
  GPT2_END,
  gpt2_vocabulary,
  load_tokenizer,
)
from rosetta_t5.run_report.contents import summary_row
from rosetta_t5.run_report.run_folder import read_runs
from rosetta_t5.telemetry.event_files import read_event_file

Folder = pathlib.Path
FIXTURES = pathlib.Path(__file__).parents[1] / "checkpoints/fixtures"
GIN = """
from __gin__ import dynamic_registration
import seqio
include '{other}'
# A comment.
A = [1, 2.5, 'x', None, {{"b": (1, -2)}}]
scope/module.function.argument = @seqio.Feature()
function.other = %A
function:
  x = 1
  y = \\
    'long' 'text'
"""
WORDS = ("red", "old", "cat", "hat", "sea", "sun")


@dataclasses.dataclass(frozen=True)
class Parser:
  """Reads files of one kind.

  Attributes:
    name: the kind.
    write: writes intact files into an empty folder.
    files: patterns of the files that are damaged, and what is inside these files.
    read: reads everything in the folder.
    examples: how many kinds of damage `make test` tries.
  """

  name: str
  write: Callable[[Folder], object]
  files: Mapping[str, Structure | None]
  read: Callable[[Folder], object]
  examples: int = 20


def _copy(fixture: str) -> Callable[[Folder], object]:
  return lambda folder: shutil.copytree(FIXTURES / fixture, folder, dirs_exist_ok=True)


def _read_checkpoint(path: Folder) -> None:
  arrays = read_arrays(path)
  read_run_facts(path)
  read_model_settings(path, arrays)
  for array in arrays.values():
    array.get()


def _arrays() -> dict[str, object]:
  kernel = np.arange(24, dtype=np.float32).reshape(4, 6)
  return {
    n: as_stored_array(x) for n, x in {"state/step": np.int32(3), "target/a/kernel": kernel}.items()
  }


def _write_older(folder: Folder) -> None:
  t5x_layouts.write_older(folder / "checkpoint_3", _arrays())


def _write_orbax(folder: Folder) -> None:
  t5x_layouts.write_orbax(folder / "checkpoint_3", _arrays())
  facts = folder / "checkpoint_3/_CHECKPOINT_METADATA"
  facts.write_text(json.dumps({**json.loads(facts.read_text()), "custom_metadata": {"seed": 1}}))


def _write_prepared(folder: Folder) -> None:
  (folder / "in").mkdir()
  (folder / "in/pieces.model").write_bytes(_sentencepiece_model())
  lines = [json.dumps({"text": " ".join(WORDS)}) for _ in range(20)]
  (folder / "in/a.jsonl").write_text("\n".join(lines))
  prepare(
    str(folder / "in/a.jsonl"),
    str(folder / "in/pieces.model"),
    folder / "out",
    executor=InlineExecutor(),
  )


def _read_prepared(folder: Folder) -> None:
  stream = TokenStream(folder / "out", "train")
  stream.read([0, stream.size // 2], 20)


@functools.cache
def _sentencepiece_model() -> bytes:
  return train_sentencepiece([" ".join(WORDS)] * 20, vocab_size=18)


def _write_sentencepiece(folder: Folder) -> None:
  (folder / "spiece.model").write_bytes(_sentencepiece_model())


def _read_sentencepiece(folder: Folder) -> None:
  complete_tokenizer(epath.Path(folder), {"model_type": "gpt2", PADDING_IS_TOKEN_0: True})
  load_sentencepiece(folder / "spiece.model").encode("old cat")


def _write_gpt(folder: Folder) -> None:
  sizes = {"n_embd": 4, "n_head": 2, "n_layer": 1, "n_positions": 3, "vocab_size": 7}
  shapes = {"wte.weight": (7, 4), "wpe.weight": (3, 4), "ln_f.weight": (4,), "ln_f.bias": (4,)}
  for name, shape in {
    "attn.c_attn": (4, 12),
    "attn.c_proj": (4, 4),
    "mlp.c_fc": (4, 16),
    "mlp.c_proj": (16, 4),
  }.items():
    shapes |= {f"h.0.{name}.weight": shape, f"h.0.{name}.bias": shape[1:]}
  for name in ("ln_1", "ln_2"):
    shapes |= {f"h.0.{name}.weight": (4,), f"h.0.{name}.bias": (4,)}
  save_file({n: np.ones(s, np.float32) for n, s in shapes.items()}, folder / "model.safetensors")
  config = {"model_type": "gpt2", "eos_token_id": 6, **sizes}
  (folder / "config.json").write_text(json.dumps(config))


def _write_gpt2_vocabulary(folder: Folder) -> None:
  pieces = [*sorted(ByteLevel.alphabet()), "th", "the", GPT2_END]
  (folder / "vocab.json").write_text(json.dumps({piece: n for n, piece in enumerate(pieces)}))
  (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e")


def _read_gpt2_vocabulary(folder: Folder) -> None:
  load_tokenizer.cache_clear()
  vocabulary = gpt2_vocabulary(str(folder / "vocab.json"), str(folder / "merges.txt"))
  vocabulary.decode(vocabulary.encode("the then"))


def _write_gin(folder: Folder) -> None:
  (folder / "run.gin").write_text(GIN.format(other=folder / "other.gin"))
  (folder / "other.gin").write_text("B = 2")


def _read_gin(folder: Folder) -> None:
  read_program([str(folder / "run.gin")])


def _write_records(folder: Folder) -> None:
  rows = [{"text": "a b", "n": 1}, {"text": "cé", "n": 2}]
  lines = "\n".join(json.dumps(row) for row in rows).encode()
  (folder / "a.jsonl").write_bytes(lines)
  (folder / "a.csv").write_text('text,n\n"a,b",1\nc,2\n')
  (folder / "a.tsv").write_text("text\tn\na\t1\n")
  (folder / "a.txt").write_text("one\n\ntwo\n")
  (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
  (folder / "a.jsonl.xz").write_bytes(lzma.compress(lines))
  (folder / "a.jsonl.bz2").write_bytes(bz2.compress(lines))
  table = pyarrow.Table.from_pylist(rows)
  with pyarrow.CompressedOutputStream(str(folder / "a.jsonl.zst"), "zstd") as file:
    file.write(lines)
  parquet.write_table(table, folder / "a.parquet")
  with pyarrow.ipc.new_stream(str(folder / "a.arrow"), table.schema) as writer:
    writer.write_table(table)


def _read_records(folder: Folder) -> None:
  for file in sorted(folder.iterdir()):
    for _ in read_records(str(file)):
      pass


def _write_tfrecord(folder: Folder) -> None:
  tf = import_tensorflow()
  text = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"a b"]))
  example = tf.train.Example(features=tf.train.Features(feature={"inputs": text}))
  with tf.io.TFRecordWriter(str(folder / "a.tfrecord")) as writer:
    writer.write(example.SerializeToString())


def _read_tfrecord(folder: Folder) -> None:
  seqio = import_seqio()
  features = {n: seqio.Feature(seqio.ByteVocabulary()) for n in ("inputs", "targets")}
  file = str(folder / "a.tfrecord")
  name = create_task_from_tfexample_file([file], "tfrecord", "inputs", None, features)
  cfg = DatasetConfig(name, {"inputs": 9, "targets": 9}, "infer", 1, shuffle=False, seed=0)
  data = InferenceData(cfg, seqio.EncDecFeatureConverter, 0, 1)
  for _ in data.chunks(data.tasks[0], 8):
    pass


def _write_model_file(folder: Folder) -> None:
  config = {"@call": "t5x.examples.t5.network.T5Config", "vocab_size": 384, "dtype": "float32"}
  vocabulary = {"@call": "seqio.ByteVocabulary", "extra_ids": 100}
  model = {
    "@call": "t5x.models.EncoderDecoderModel",
    "module": {"@call": "t5x.examples.t5.network.Transformer", "config": config},
    "input_vocabulary": vocabulary,
    "output_vocabulary": vocabulary,
    "optimizer_def": None,
    "decode_fn": {"@name": "t5x.decoding.beam_search", "alpha": 0.6},
  }
  dataset = {
    "@call": "t5x.utils.DatasetConfig",
    "mixture_or_task_name": "a_task",
    "task_feature_lengths": {"inputs": 8, "targets": 8},
    "split": "train",
    "batch_size": 2,
    "shuffle": False,
    "seed": None,
  }
  content = {"version": 1, "modules": ["t5x.utils"], "model": model, "eval_steps": 1}
  content |= {"train_dataset_cfg": dataset, "task_feature_lengths": {"inputs": 8}}
  content["partitioner"] = {"@call": "t5x.partitioning.PjitPartitioner", "num_partitions": 1}
  (folder / "model.json").write_text(json.dumps(content))


def _read_model_file(folder: Folder) -> None:
  if described := read_model_file(folder / "model.json"):
    described.import_modules()
    dict(described)


def _write_events(folder: Folder) -> None:
  add_event_file(folder / "train", [(1, {"loss": 1.0}), (2, {"loss": 0.5})])


def _read_events(folder: Folder) -> None:
  for file in folder.glob("*/events*"):
    read_event_file(file)


def _read_run(folder: Folder) -> None:
  (run,) = read_runs([str(folder)])
  summary_row(run)


PARSERS = (
  Parser("safetensors", _copy("t5_1_1"), {"*.safetensors": SAFETENSORS}, _read_checkpoint),
  Parser("config_json", _copy("t5_1_1"), {"config.json": JSON}, _read_checkpoint),
  Parser("gpt", _write_gpt, {"config.json": JSON}, _read_checkpoint),
  Parser("hugging_face_index", _copy("mt5_sharded"), {"*.index.json": JSON}, _read_checkpoint),
  Parser(
    "mesh_tensorflow",
    _copy("mesh_tf"),
    {"checkpoint": None, "*.index": None, "*.data*": None},
    _read_checkpoint,
  ),
  Parser(
    "t5x_older",
    _write_older,
    {"*/checkpoint": MSGPACK, "*/*/.zarray": JSON, "*/*/0*": None},
    lambda folder: _read_checkpoint(folder / "checkpoint_3"),
  ),
  Parser(
    "orbax",
    _write_orbax,
    {
      "*/_CHECKPOINT_METADATA": JSON,
      "*/state/_METADATA": JSON,
      "*/state/manifest*": None,
      "*/state/d/*": None,
    },
    lambda folder: _read_checkpoint(folder / "checkpoint_3"),
  ),
  Parser(
    "prepared_data",
    _write_prepared,
    {"*/manifest.json": JSON, "*/*.array_record": None},
    _read_prepared,
  ),
  Parser("sentencepiece", _write_sentencepiece, {"*.model": None}, _read_sentencepiece),
  Parser(
    "gpt2_vocabulary",
    _write_gpt2_vocabulary,
    {"vocab.json": JSON, "merges.txt": None},
    _read_gpt2_vocabulary,
  ),
  Parser("gin", _write_gin, {"*.gin": None}, _read_gin),
  Parser(
    "own_files",
    _write_records,
    {
      "*.jsonl": None,
      "*.csv": None,
      "*.tsv": None,
      "*.txt": None,
      "*.gz": None,
      "*.zst": None,
      "*.xz": None,
      "*.bz2": None,
      "*.parquet": None,
      "*.arrow": None,
    },
    _read_records,
  ),
  Parser("model_file", _write_model_file, {"model.json": JSON}, _read_model_file),
  Parser("tfrecord", _write_tfrecord, {"*.tfrecord": RECORDS}, _read_tfrecord, examples=2),
  Parser("event_files", _write_events, {"*/events*": RECORDS}, _read_events),
  Parser(
    "run_folder",
    write_run,
    {"*.gin": None, "*.txt": None, "*.jsonl": None, "*/*.jsonl": None},
    _read_run,
  ),
)
