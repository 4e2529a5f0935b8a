"""The gin file of a Hugging Face folder: its network, its tokenizer, and how it generates."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from rosetta_t5.checkpoints.arrays.tree_layouts import to_plain_tree
from rosetta_t5.checkpoints.formats.hugging_face import folder as hugging_face
from rosetta_t5.checkpoints.formats.hugging_face import t5
from rosetta_t5.data.vocabularies.sentencepiece_models import load_sentencepiece
from rosetta_t5.data.vocabularies.task_vocabularies import tokenizer_vocabulary
from rosetta_t5.files import read_json_object

# Where a SentencePiece model is looked for, in this order.
_SENTENCEPIECE = ("spiece.model", "sentencepiece.model", "tokenizer.model")
_SENTINEL = re.compile(r"<extra_id_\d+>")
_DEFAULT_LENGTHS = {"inputs": 512, "targets": 128}
_MAX_LENGTH = 1 << 20  # Tokenizers without a limit state 1e30.
# Entries of generation_config.json that decode functions have under the same name, with their defaults.
_CONTROLS: dict[str, Any] = {
  "repetition_penalty": 1.0,
  "no_repeat_ngram_size": 0,
  "min_length": 0,
  "min_new_tokens": 0,
  "bad_words_ids": [],
}
# Entries that this module reads in another way, or that do not change what is generated here.
_OTHERS = (
  *("max_length", "max_new_tokens", "do_sample", "num_beams", "temperature", "top_k", "top_p"),
  *("length_penalty", "suppress_tokens", "use_cache", "cache_implementation"),
  *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
  *("transformers_version", "_from_model_config"),
  *("output_attentions", "output_hidden_states", "output_scores", "return_dict_in_generate"),
)
_RECIPE = """
from __gin__ import dynamic_registration

import __main__ as train_script
import seqio
from rosetta_t5 import data
from t5x import decoding
from t5x import models
from t5x import partitioning
from t5x import trainer
from t5x import utils
from t5x.examples.{package} import network

train_script.train:
  model = %MODEL
  partitioner = @partitioning.PjitPartitioner()
  train_dataset_cfg = @utils.DatasetConfig()
  trainer_cls = @trainer.Trainer
  eval_steps = 20
partitioning.PjitPartitioner.num_partitions = 1
trainer.Trainer:
  num_microbatches = None
  learning_rate_fn = @utils.create_learning_rate_scheduler()
utils.create_learning_rate_scheduler:
  factors = 'constant'
  base_learning_rate = 0.001
utils.DatasetConfig:
  mixture_or_task_name = ''  # a folder has no task
  split = 'validation'
  batch_size = 8
  shuffle = False
  seed = 0
"""
# {network package: the recipe that a folder's recipe includes, and the classes of its config and its model}
_BASES = {
  "decoder_only": ("gin/models/gpt/gpt2.gin", "TransformerConfig", "DecoderOnlyModel"),
  "t5": ("gin/models/t5_1_1/base.gin", "T5Config", "EncoderDecoderModel"),
  "scalable_t5": ("gin/models/scalable_t5/t5_1_1/base.gin", "T5Config", "EncoderDecoderModel"),
}


def hugging_face_recipe(path: pathlib.Path) -> tuple[str, list[str]]:
  """Returns a gin file for the model of a Hugging Face folder, and notes on what it does not follow.

  Raises:
    ValueError: the folder has no tokenizer, or is not one that `read_arrays` reads.
  """
  file = path / hugging_face.CONFIG
  config = hugging_face.read_config(file)
  arrays = to_plain_tree(hugging_face.read_arrays(path))
  network = hugging_face.network_settings(file, config, arrays)
  is_gpt = hugging_face.is_gpt(config)
  notes: list[str] = []
  settings = _read(path / "tokenizer_config.json")
  generation = _read(path / "generation_config.json")
  vocabulary = _vocabulary(path, config, settings, notes)
  if vocabulary[0] == "data.tokenizer_vocabulary":  # T5's extra ids are not always used.
    more = int(tokenizer_vocabulary(**vocabulary[1]).vocab_size) - network["vocab_size"]
    if more > 0:
      notes.append(f"the tokenizer has {more} tokens more than the table has rows")
      network["vocab_size"] += more
  decode_fn, decoding = _decoding(generation, vocabulary[1].get("shift", 0), notes)
  package = "decoder_only" if is_gpt else "scalable_t5" if t5.has_own_biases(arrays) else "t5"
  base, config_class, model_class = _BASES[package]
  lengths = _lengths(config, settings, generation)
  if is_gpt:
    lengths = {"targets": network["max_length"]}
  if is_gpt and decode_fn == "temperature_sample" and generation.get("max_new_tokens"):
    # A row of a decoder contains the prompt too.
    decoding["max_decode_steps"] = min(generation["max_new_tokens"], lengths["targets"] // 2)
  rate = config.get("dropout_rate", config.get("resid_pdrop", config.get("resid_dropout", 0.1)))
  network |= {"dtype": "float32", "dropout_rate": rate}
  if not is_gpt and generation.get("decoder_start_token_id") is not None:
    network["decoder_start_token_id"] = generation["decoder_start_token_id"]
  if "repetition_penalty" in decoding and (is_gpt or network["decoder_start_token_id"]):
    notes.append("repetition_penalty does not count the start token, unlike in Transformers")
  beams = generation.get("num_beams") or 1
  bindings = {
    "VOCABULARY": f"@{vocabulary[0]}()",
    **{f"{vocabulary[0]}.{name}": repr(value) for name, value in vocabulary[1].items()},
    **{f"network.{config_class}.{name}": repr(value) for name, value in network.items()},
    f"models.{model_class}.decode_fn": f"@decoding.{decode_fn}",
    **{f"decoding.{decode_fn}.{name}": repr(value) for name, value in decoding.items()},
    f"models.{model_class}.predict_batch_with_aux.num_decodes": repr(beams),
    "utils.DatasetConfig.task_feature_lengths": repr(lengths),
    "DROPOUT_RATE": repr(rate),
  }
  lines = "\n".join(f"{name} = {value}" for name, value in bindings.items())
  recipe = _RECIPE.format(package=package)
  return f"# {path}\ninclude '{base}'\n{recipe}\n{lines}\n", notes


def _read(file: pathlib.Path) -> dict[str, Any]:
  """Returns the content of a JSON file; {} if there is none."""
  return read_json_object(file) if file.exists() else {}


def _vocabulary(
  path: pathlib.Path, config: Mapping[str, Any], settings: Mapping[str, Any], notes: list[str]
) -> tuple[str, dict[str, Any]]:
  """Returns the function that makes the folder's vocabulary, and its arguments, and adds to the notes.

  A SentencePiece model is preferred, because it works in tasks and exports too. It is not used if tokens
  were added to it, or if texts end with another token.
  """
  if settings.get("tokenizer_class") == "ByT5Tokenizer":
    return "seqio.ByteVocabulary", {"extra_ids": settings.get("extra_ids", 125)}
  is_shifted = hugging_face.has_shifted_ids(config)
  added = _added_tokens(path, settings)
  model = next((path / name for name in _SENTENCEPIECE if (path / name).exists()), None)
  tokenizer = path / "tokenizer.json"
  if model is not None and not is_shifted:
    pieces = load_sentencepiece(model)
    new = [token for token in added if pieces.unk_id() == pieces.piece_to_id(token)]
    sentinels = [token for token in new if _SENTINEL.fullmatch(token)]
    # No text has <s> or <pad>, which `reserve_padding` may have replaced.
    others = {*new} - {*sentinels, pieces.id_to_piece(pieces.unk_id()), "<s>", "<pad>"}
    has_other_end = config.get("eos_token_id") not in (None, pieces.eos_id(), [pieces.eos_id()])
    if not tokenizer.exists() or not (others or has_other_end):
      if others or has_other_end:
        names = ", ".join(sorted(others)) or f"the end token {config['eos_token_id']}"
        notes.append(f"{model.name} lacks {names}: save the tokenizer as tokenizer.json too")
      default = 100 if config["model_type"] == "t5" and not added else len(sentinels)
      return "seqio.SentencePieceVocabulary", {
        "sentencepiece_model_file": str(model),
        "extra_ids": settings.get("extra_ids", default) if not sentinels else default,
      }
  end = _eos_token(path, config, settings)
  if tokenizer.exists():
    return "data.tokenizer_vocabulary", {
      "file": str(tokenizer),
      "eos_token": end,
      "shift": int(is_shifted),
    }
  if (path / "vocab.json").exists() and (path / "merges.txt").exists():
    files = {"vocab_file": str(path / "vocab.json"), "merges_file": str(path / "merges.txt")}
    return "data.gpt2_vocabulary", files
  raise ValueError(
    f"{path} has no tokenizer: it must contain {', '.join(_SENTENCEPIECE)}, tokenizer.json, or "
    "vocab.json with merges.txt"
  )


def _added_tokens(path: pathlib.Path, settings: Mapping[str, Any]) -> list[str]:
  """Returns the tokens that a folder adds to its SentencePiece model, and special ones of the model."""
  listed = _read(path / "tokenizer.json").get("added_tokens", [])
  listed = [*listed, *(settings.get("added_tokens_decoder") or {}).values()]
  extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
  names = [*_read(path / "added_tokens.json"), *extra]
  return list(dict.fromkeys([*(token["content"] for token in listed), *map(str, names)]))


def _eos_token(path: pathlib.Path, config: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
  """Returns the token with which texts end: that of config.json, else that of tokenizer_config.json."""
  ids = config.get("eos_token_id")
  number = ids[0] if isinstance(ids, list) else ids
  if number is not None and (path / "tokenizer.json").exists():
    from tokenizers import Tokenizer

    if token := Tokenizer.from_file(str(path / "tokenizer.json")).id_to_token(number):
      return token
  token = settings.get("eos_token") or "</s>"
  return token["content"] if isinstance(token, dict) else token


def _decoding(
  generation: Mapping[str, Any], shift: int, notes: list[str]
) -> tuple[str, dict[str, Any]]:
  """Returns the decode function for a generation_config.json and its arguments, and adds to the notes."""
  arguments = {
    name: generation[name]
    for name, default in _CONTROLS.items()
    if generation.get(name) not in (None, default)
  }
  words = [
    *arguments.pop("bad_words_ids", []),
    *([x] for x in generation.get("suppress_tokens") or []),
  ]
  if words:
    arguments["bad_words_ids"] = [[token + shift for token in word] for word in words]
  known = {*_CONTROLS, *_OTHERS}
  if unknown := [f"{k} = {json.dumps(v)}" for k, v in generation.items() if k not in known and v]:
    notes.append(f"these settings of generation_config.json have no effect: {', '.join(unknown)}")
  if (generation.get("num_beams") or 1) > 1:
    penalty = generation.get("length_penalty")
    arguments["alpha"] = 1.0 if penalty is None else float(penalty)
    notes.append("beams are compared with T5X's brevity penalty, where length_penalty is alpha")
    return "beam_search", arguments
  arguments |= {"rescale_log_probs": False, "temperature": 0.0}
  if generation.get("do_sample"):
    top_p = generation.get("top_p") or 1.0
    chosen = {"topp": top_p, "topk": 0} if top_p < 1 else {"topk": generation.get("top_k", 50) or 0}
    arguments |= {"temperature": float(generation.get("temperature") or 1.0), **chosen}
  return "temperature_sample", arguments


def _lengths(
  config: Mapping[str, Any], settings: Mapping[str, Any], generation: Mapping[str, Any]
) -> dict[str, int]:
  """Returns the numbers of tokens of inputs and targets: the folder's limits, if it states them."""
  inputs = settings.get("model_max_length") or config.get("n_positions") or 0
  # max_length counts the start token.
  targets = generation.get("max_new_tokens") or (generation.get("max_length") or 1) - 1
  limit = _DEFAULT_LENGTHS["inputs"] if not 0 < inputs < _MAX_LENGTH else int(inputs)
  return {"inputs": limit, "targets": targets or _DEFAULT_LENGTHS["targets"]}
