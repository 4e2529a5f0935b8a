"""The gin file of a Hugging Face folder: its network, its tokenizer, and how it generates."""

import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from rosetta_t5.checkpoints.arrays.parameter_trees import to_plain_tree
from rosetta_t5.checkpoints.formats.hugging_face import folder as hugging_face
from rosetta_t5.data.vocabularies.sentencepiece_models import load_sentencepiece
from rosetta_t5.data.vocabularies.task_vocabularies import tokenizer_vocabulary
from rosetta_t5.data.vocabularies.tokenizer_folder import read_tokenizer_folder
from rosetta_t5.files import read_json_object

# Where a SentencePiece model is looked for, in this order.
_SENTENCEPIECE = ("spiece.model", "sentencepiece.model", "tokenizer.model")
_SENTINEL = re.compile(r"<extra_id_\d+>")
_DEFAULT_LENGTHS = {"inputs": 512, "targets": 128}
_LONGEST_ROW = 2048  # of decoders, some of which have more positions than fit into memory
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
# What the gin file of a folder lacks to be that of a run.
RUN_PART = pathlib.Path(__file__).with_name("hugging_face_recipe.gin")
_IMPORTS = (
  "from __gin__ import dynamic_registration\nimport seqio\nfrom rosetta_t5 import data\n"
  + "".join(f"from t5x import {name}\n" for name in ("decoding", "models", "utils"))
)
# The network's package, the recipe that a folder's recipe includes, and the classes of its config and its model.
_DECODER = ("decoder_only", "decoder_only/base.gin", "TransformerConfig", "DecoderOnlyModel")
_ENCODER_DECODER = ("t5", "t5_1_1/base.gin", "T5Config", "EncoderDecoderModel")


def hugging_face_recipe(path: pathlib.Path) -> tuple[str, list[str]]:
  """Returns a gin file for the model of a Hugging Face folder, and notes on what it does not follow.

  `--gin_file=FOLDER` and `include 'FOLDER'` read it.

  Raises:
    ValueError: the folder has no tokenizer, or is not one that `read_arrays` reads.
  """
  folder = _Folder(path)
  return folder.recipe(), folder.notes


class _Folder:
  """The settings of a Hugging Face folder, and how a gin file expresses them.

  Attributes:
    notes: sentences on what the gin file does not follow.
  """

  def __init__(self, path: pathlib.Path):
    file = path / hugging_face.CONFIG
    self.path = path
    self.config = hugging_face.read_config(file)
    self.tokenizer_config = _read(path / "tokenizer_config.json")
    self.generation = _read(path / "generation_config.json")
    self.beams = self.generation.get("num_beams") or 1
    self.is_decoder = hugging_face.is_decoder(self.config)
    self.notes: list[str] = []
    arrays = to_plain_tree(hugging_face.read_arrays(path))
    self.network = hugging_face.network_settings(file, self.config, arrays)
    self.is_shifted = bool(self.network.get("padding_never_follows"))

  def recipe(self) -> str:
    """Returns the gin file."""
    vocabulary, arguments = self._vocabulary()
    decode_fn, decoding = self._decoding()
    network, lengths = self._network(vocabulary, arguments), self._lengths()
    rate = network.pop("dropout_rate")  # The recipe that is included sets it to DROPOUT_RATE.
    if self.is_decoder and self.generation.get("max_new_tokens"):
      # A row of a decoder contains the prompt too.
      limit = "max_decode_step" if self.beams > 1 else "max_decode_steps"
      decoding[limit] = min(self.generation["max_new_tokens"], lengths["targets"] // 2)
    package, base, config_class, model_class = _DECODER if self.is_decoder else _ENCODER_DECODER
    values = {
      **{f"{vocabulary}.{name}": value for name, value in arguments.items()},
      **{f"network.{config_class}.{name}": value for name, value in network.items()},
      **{f"decoding.{decode_fn}.{name}": value for name, value in decoding.items()},
      "TASK_FEATURE_LENGTHS": lengths,
      "DROPOUT_RATE": rate,
      "INITIAL_CHECKPOINT_PATH": str(self.path),
      "utils.RestoreCheckpointConfig.resize_vocabulary": True,  # for added tokens
    }
    if self.beams > 1:
      values[f"models.{model_class}.predict_batch_with_aux.num_decodes"] = self.beams
    if len(ends := self._ends()) > 1:
      values[f"models.{model_class}.predict_batch_with_aux.decoder_params"] = {"eos_id": ends}
    if (network.get("encoder") or {}).get("global_block_size"):  # blocks of packed rows are refused
      values |= {f"{use}/utils.DatasetConfig.pack": False for use in ("train", "train_eval")}
    head = f"# {self.path}\ninclude 'gin/models/{base}'\n{_IMPORTS}"
    head += f"from t5x.examples.{package} import network\nVOCABULARY = @{vocabulary}()\n"
    head += f"models.{model_class}.decode_fn = @decoding.{decode_fn}\n"
    return head + "".join(f"{name} = {value!r}\n" for name, value in values.items())

  def _network(self, vocabulary: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of the network's config."""
    rates = ("dropout_rate", "resid_pdrop", "resid_dropout", "attention_dropout")
    rate = next((self.config[name] for name in rates if name in self.config), 0.1)
    network = self.network | {"dtype": "float32", "dropout_rate": rate}
    if vocabulary == "data.tokenizer_vocabulary":  # T5's extra ids are not always used.
      unused = network.get("unused_rows", 0)
      more = int(tokenizer_vocabulary(**arguments).vocab_size) - network["vocab_size"] + unused
      if more > 0:
        self.notes.append(f"the tokenizer has {more} tokens more than the table has rows")
        network["vocab_size"] += max(0, more - unused)
        network["unused_rows"] = max(0, unused - more)
    start = self.generation.get("decoder_start_token_id")
    if not self.is_decoder and start is not None:
      network["decoder_start_token_id"] = start
    return network

  def _vocabulary(self) -> tuple[str, dict[str, Any]]:
    """Returns the function that makes the folder's vocabulary, and its arguments.

    Of an encoder-decoder, a SentencePiece model is preferred, because it works in exports too. It is not used if
    tokens were added to it, if texts end with another token, or if the folder has a chat template. A decoder's
    tokenizer.json also says whether the end token follows the inputs.
    """
    path = self.path
    if self.tokenizer_config.get("tokenizer_class") == "ByT5Tokenizer":
      return "seqio.ByteVocabulary", {"extra_ids": self.tokenizer_config.get("extra_ids", 125)}
    model = next((path / name for name in _SENTENCEPIECE if (path / name).exists()), None)
    tokenizer = path / "tokenizer.json"
    has_tokenizer = tokenizer.exists()
    is_whole = has_tokenizer and (self.is_decoder or read_tokenizer_folder(str(path)).chat_template)
    if model is not None and not (self.is_shifted or is_whole):
      extra_ids, missing = self._extra_tokens(model)
      if not (missing and has_tokenizer):
        if missing:
          names = ", ".join(sorted(missing))
          self.notes.append(f"{model.name} lacks {names}: save the tokenizer as tokenizer.json too")
        arguments = {"sentencepiece_model_file": str(model), "extra_ids": extra_ids}
        return "seqio.SentencePieceVocabulary", arguments
    if has_tokenizer:
      return "data.tokenizer_vocabulary", {"file": str(tokenizer), "shift": int(self.is_shifted)}
    if (path / "vocab.json").exists() and (path / "merges.txt").exists():
      files = {"vocab_file": str(path / "vocab.json"), "merges_file": str(path / "merges.txt")}
      return "data.gpt2_vocabulary", files
    raise ValueError(
      f"{path} has no tokenizer: it must contain {', '.join(_SENTENCEPIECE)}, tokenizer.json, or "
      "vocab.json with merges.txt"
    )

  def _extra_tokens(self, model: pathlib.Path) -> tuple[int, set[str]]:
    """Returns the number of sentinels that follow a SentencePiece model, and other tokens that it lacks."""
    pieces, added = load_sentencepiece(model), self._added_tokens()
    new = [token for token in added if pieces.unk_id() == pieces.piece_to_id(token)]
    sentinels = [token for token in new if _SENTINEL.fullmatch(token)]
    # No text has <s> or <pad>, which `reserve_padding` may have replaced.
    missing = {*new} - {*sentinels, pieces.id_to_piece(pieces.unk_id()), "<s>", "<pad>"}
    end = self.config.get("eos_token_id")
    if end not in (None, pieces.eos_id(), [pieces.eos_id()]):
      missing.add(f"the end token {end}")
    if sentinels:
      return len(sentinels), missing
    default = 100 if self.config["model_type"] == "t5" and not added else 0
    return self.tokenizer_config.get("extra_ids", default), missing

  def _added_tokens(self) -> list[str]:
    """Returns the tokens that a folder adds to its SentencePiece model, and special ones of the model."""
    settings = self.tokenizer_config
    listed = _read(self.path / "tokenizer.json").get("added_tokens", [])
    listed = [*listed, *(settings.get("added_tokens_decoder") or {}).values()]
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    names = [*_read(self.path / "added_tokens.json"), *extra]
    return list(dict.fromkeys([*(token["content"] for token in listed), *map(str, names)]))

  def _decoding(self) -> tuple[str, dict[str, Any]]:
    """Returns the decode function for a generation_config.json and its arguments."""
    given = {name: value for name, value in self.generation.items() if value is not None}
    arguments = self._controls(given)
    if self.beams > 1:
      if given.get("do_sample"):
        self.notes.append("in generation_config.json do_sample has no effect beside num_beams > 1")
      return "beam_search", arguments | {"alpha": float(given.get("length_penalty", 1.0))}
    arguments |= {"rescale_log_probs": False, "temperature": 0.0}
    if given.get("do_sample"):
      top_k, top_p = self.generation.get("top_k", 50) or 0, given.get("top_p", 1.0)
      arguments |= {"temperature": float(given.get("temperature", 1.0)), "topk": top_k}
      arguments |= {"topp": top_p} if top_p < 1 and top_k != 1 else {}
    return "temperature_sample", arguments

  def _ends(self) -> list[int]:
    """Returns the ids that end what the model generates; the vocabulary has one of them."""
    ends = self.generation.get("eos_token_id", self.config.get("eos_token_id"))
    return [end + self.is_shifted for end in ends] if isinstance(ends, list) else []

  def _controls(self, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that all decode functions have, and notes the settings without effect."""
    known = {*_CONTROLS, *_OTHERS} - ({"max_length"} if self.is_decoder else set())
    if unknown := [f"{k} = {json.dumps(v)}" for k, v in given.items() if k not in known and v]:
      self.notes.append(f"in generation_config.json these have no effect: {', '.join(unknown)}")
    changed = (name for name, default in _CONTROLS.items() if given.get(name, default) != default)
    arguments = {name: given[name] for name in changed}
    words = arguments.pop("bad_words_ids", []) + [[x] for x in given.get("suppress_tokens", [])]
    if words:
      arguments["bad_words_ids"] = [[token + self.is_shifted for token in word] for word in words]
    return arguments

  def _lengths(self) -> dict[str, int]:
    """Returns the numbers of tokens of inputs and targets: the folder's limits, if it states them."""
    if self.is_decoder:
      return {"targets": min(self.network["max_length"], _LONGEST_ROW)}
    inputs = self.tokenizer_config.get("model_max_length") or self.config.get("n_positions") or 0
    # max_length counts the start token.
    targets = self.generation.get("max_new_tokens") or (self.generation.get("max_length") or 1) - 1
    limit = int(inputs) if 0 < inputs < _MAX_LENGTH else _DEFAULT_LENGTHS["inputs"]
    return {"inputs": limit, "targets": targets or _DEFAULT_LENGTHS["targets"]}


def _read(file: pathlib.Path) -> dict[str, Any]:
  """Returns the content of a JSON file; {} if there is none."""
  return read_json_object(file) if file.exists() else {}
