"""A converted folder generates the same texts in Transformers as the run generates here."""

from __future__ import annotations

import json

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from rosetta_t5 import cli
from rosetta_t5.checkpoints.arrays.lazy_arrays import as_stored_array
from rosetta_t5.checkpoints.formats import t5x_layouts
from rosetta_t5.conversion.convert import convert
from rosetta_t5.data.vocabularies.sentencepiece_models import train_sentencepiece
from rosetta_t5.data.vocabularies.task_vocabularies import GPT2_END
from rosetta_t5.networks.transformer import DecoderWrapper, T5Config, Transformer, TransformerConfig

pytestmark = pytest.mark.slow
SENTENCE = "the old house by the sea had seven rooms and nobody knew who lived there now"
LINES = [" ".join(np.random.default_rng(n).permutation(SENTENCE.split())) for n in range(400)]
PROMPTS = [line[:40].rsplit(" ", 1)[0] for line in LINES[:6]]
NEW_TOKENS = 12
SIZES = {"emb_dim": 32, "num_heads": 4, "head_dim": 8, "dropout_rate": 0.0}
T5 = SIZES | {"num_encoder_layers": 2, "num_decoder_layers": 2, "mlp_dim": 64}
T5 |= {"mlp_activations": ("gelu", "linear")}
GPT = SIZES | {"num_layers": 2, "mlp_dim": 128, "mlp_activations": ("gelu",), "max_length": 64}
GPT |= {"logits_via_embedding": True, "divide_tied_logits": False, "positions": "learned"}
GPT |= {"norm": "layer", "norm_epsilon": 1e-5, "use_bias": True, "scale_queries": True}
GPT |= {"padding_never_follows": True, "init_stddev": 0.4}
RUN = """
from __gin__ import dynamic_registration
import __main__ as train_script
import seqio
from rosetta_t5 import data
from t5x import decoding
from t5x import models
from t5x import adafactor
from t5x import partitioning
from t5x import utils
from t5x.examples.{package} import network

train_script.train:
  model = @models.{model}()
  partitioner = @partitioning.PjitPartitioner()
  train_dataset_cfg = @utils.DatasetConfig()
models.{model}:
  module = @network.{module}()
  optimizer_def = @adafactor.Adafactor()
  decode_fn = @decoding.temperature_sample
decoding.temperature_sample:
  temperature = 0.0
  max_decode_steps = {steps}
partitioning.PjitPartitioner.num_partitions = 1
utils.DatasetConfig:
  mixture_or_task_name = 'none'
  task_feature_lengths = {lengths}
  split = 'train'
  batch_size = 8
  shuffle = False
  seed = 0
"""
T5_LINES = """
models.EncoderDecoderModel:
  input_vocabulary = @seqio.SentencePieceVocabulary()
  output_vocabulary = @seqio.SentencePieceVocabulary()
seqio.SentencePieceVocabulary:
  sentencepiece_model_file = '{folder}/spiece.model'
  extra_ids = 0
network.Transformer.config = @network.T5Config()
"""
GPT_LINES = """
models.DecoderOnlyModel.vocabulary = @data.gpt2_vocabulary()
data.gpt2_vocabulary:
  vocab_file = '{folder}/vocab.json'
  merges_file = '{folder}/merges.txt'
network.DecoderWrapper.config = @network.TransformerConfig()
"""
GPT_SENTENCEPIECE_LINES = """
models.DecoderOnlyModel.vocabulary = @seqio.SentencePieceVocabulary()
seqio.SentencePieceVocabulary:
  sentencepiece_model_file = '{folder}/spiece.model'
  extra_ids = 0
network.DecoderWrapper.config = @network.TransformerConfig()
"""


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
  for package in ("torch", "transformers", "tokenizers"):
    pytest.importorskip(package)
  monkeypatch.setattr("rosetta_t5.parallel.process_settings.enable_compilation_cache", lambda: None)
  yield
  gin.clear_config()


def write_run(folder, module, *tokens, lines, lengths, first=None):
  """Writes a run's config.gin and a checkpoint of random parameters.

  Args:
    folder: the run's folder.
    module: the network.
    *tokens: inputs with which the network is initialized.
    lines: lines of config.gin that configure the network and its vocabulary.
    lengths: the lengths of the features.
    first: the row of the embedding table to copy to its first row; None to keep the first row.
  """
  init = jax.jit(lambda key: module.init(key, *tokens, enable_dropout=False)["params"])
  # The parameters are doubled, so that different prompts give different texts.
  params = {
    f"target/{name}": as_stored_array(np.asarray(array) * 2)
    for name, array in flatten_dict(init(jax.random.PRNGKey(1)), sep="/").items()
  }
  if first is not None:
    table = params["target/decoder/token_embedder/embedding"].get()
    table[0] = table[first]
    params["target/decoder/token_embedder/embedding"] = as_stored_array(table)
  t5x_layouts.write_orbax(folder / "checkpoint_5", params)
  is_t5 = isinstance(module, Transformer)
  text = RUN.format(
    model="EncoderDecoderModel" if is_t5 else "DecoderOnlyModel",
    module=type(module).__name__,
    package="t5" if is_t5 else "decoder_only",
    steps=NEW_TOKENS,
    lengths=lengths,
  )
  text += lines.format(folder=folder)
  config = type(module.config).__name__
  for name in ("vocab_size", *(T5 if is_t5 else GPT)):
    text += f"network.{config}.{name} = {getattr(module.config, name)!r}\n"
  (folder / "config.gin").write_text(text)


def generated_here(folder, tmp_path):
  """Returns the predictions of `rosetta-t5 infer` for the prompts."""
  (tmp_path / "prompts.txt").write_text("".join(f"{text}\n" for text in PROMPTS))
  files = ["--input", f"{tmp_path}/prompts.txt", "--output", f"{tmp_path}/predictions.jsonl"]
  assert cli.main(["infer", "--model_dir", str(folder), *files]) == 0
  rows = map(json.loads, (tmp_path / "predictions.jsonl").read_text().splitlines())
  return [row["prediction"] for row in rows]


def test_t5_generates_the_same_texts(tmp_path):
  import transformers

  run = tmp_path / "run"
  run.mkdir()
  (run / "spiece.model").write_bytes(train_sentencepiece(LINES, 36))
  tokens = jnp.ones((1, 4), jnp.int32)
  module = Transformer(T5Config(vocab_size=36, **T5))
  lengths = {"inputs": 32, "targets": NEW_TOKENS}
  write_run(run, module, tokens, tokens, tokens, lines=T5_LINES, lengths=lengths)
  folder = convert(run, tmp_path / "hf", "hf", tokenizer=run / "spiece.model")
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
  found = []
  for prompt in PROMPTS:
    ids = tokenizer(prompt, return_tensors="pt")
    generated = model.generate(**ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    found.append(tokenizer.decode(generated[0], skip_special_tokens=True))
  assert found == generated_here(run, tmp_path)
  assert len(set(found)) > 3, "different prompts must give different texts"


@pytest.mark.parametrize("is_trained", [True, False])
def test_the_pipeline_of_a_gpt_generates_the_same_texts(tmp_path, is_trained):
  """After training, the start token may differ from the end token."""
  import tokenizers
  import transformers

  run = tmp_path / "run"
  run.mkdir()
  pieces = tokenizers.ByteLevelBPETokenizer()
  pieces.train_from_iterator(LINES, vocab_size=320, show_progress=False)
  pieces.save_model(str(run))
  ids = json.loads((run / "vocab.json").read_text())
  (run / "vocab.json").write_text(json.dumps({**ids, GPT2_END: len(ids)}))
  tokens = jnp.ones((1, 4), jnp.int32)
  config = TransformerConfig(vocab_size=len(ids) + 2, **GPT)
  lengths = {"targets": 64}
  first = None if is_trained else len(ids) + 1  # A copy, as when a folder of GPT-2 is read.
  write_run(
    run, DecoderWrapper(config), tokens, tokens, lines=GPT_LINES, lengths=lengths, first=first
  )
  folder = convert(run, tmp_path / "hf", "hf", tokenizer=run)
  write = transformers.pipeline("text-generation", model=str(folder))
  found = [
    write(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, return_full_text=False)
    for prompt in PROMPTS
  ]
  texts = [result["generated_text"] for (result,) in found]
  assert texts == generated_here(run, tmp_path)
  assert len(set(texts)) > 3, "different prompts must give different texts"


def test_the_pipeline_of_a_decoder_with_sentencepiece_generates_the_same_texts(tmp_path):
  """Pax's recipes train such decoders."""
  import transformers

  run = tmp_path / "run"
  run.mkdir()
  (run / "spiece.model").write_bytes(train_sentencepiece(LINES, 36))
  tokens = jnp.ones((1, 4), jnp.int32)
  config = TransformerConfig(**{"vocab_size": 36, **GPT, "padding_never_follows": False})
  write_run(
    run,
    DecoderWrapper(config),
    tokens,
    tokens,
    lines=GPT_SENTENCEPIECE_LINES,
    lengths={"targets": 64},
  )
  folder = convert(run, tmp_path / "hf", "hf", tokenizer=run / "spiece.model")
  write = transformers.pipeline("text-generation", model=str(folder))
  found = [
    write(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, return_full_text=False)
    for prompt in PROMPTS
  ]
  # SentencePiece drops the space before a text. Transformers keeps the one after the prompt.
  texts = [result["generated_text"].removeprefix(" ") for (result,) in found]
  assert texts == generated_here(run, tmp_path)
  assert len(set(texts)) > 3, "different prompts must give different texts"
