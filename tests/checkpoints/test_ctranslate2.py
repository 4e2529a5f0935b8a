"""CTranslate2 loads the folders that `convert --to hf` writes, and generates the same tokens.

The models are those for which CTranslate2 computes what Transformers does: no text is longer than a window. Inputs
are given one at a time, because the tokens of T5Gemma 2 and GPT-2 depend on the others in their batch.
"""

from __future__ import annotations

import json

import pytest
import todays_models
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from rosetta_t5.conversion.convert import convert
from rosetta_t5.data.vocabularies.sentencepiece_models import train_sentencepiece

ctranslate2 = pytest.importorskip("ctranslate2", reason="is the engine that is tested")
for package in ("torch", "transformers"):
  pytest.importorskip(package, reason="CTranslate2's converter needs it")

NEW_TOKENS = 24
T5 = {"d_model": 32, "d_kv": 6, "d_ff": 48, "num_heads": 4, "num_layers": 2, "vocab_size": 145}
T5 |= {"decoder_start_token_id": 0, "tie_word_embeddings": False}
GATED = {"feed_forward_proj": "gated-gelu"}
GEMMA2 = {"sliding_window": 4096, "query_pre_attn_scalar": 8}
GEMMA2 |= {"attn_logit_softcapping": None, "final_logit_softcapping": None}
GEMMA3 = {"sliding_window": 512, "query_pre_attn_scalar": 8}
GEMMA3 |= {"rope_parameters": todays_models.ROPES}
TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": [*todays_models.ROPES]}
LLAMA = {"bos_token_id": 5, "eos_token_id": 6}
LLAMA3 = todays_models.LLAMA3 | {"original_max_position_embeddings": 8192}
MODELS = {
  "t5 1.1": ("T5", T5 | GATED),
  "t5 1.0": ("T5", T5 | {"tie_word_embeddings": True}),
  "ul2": ("T5", T5 | {"feed_forward_proj": "gated-silu"}),
  "mt5": ("MT5", T5 | GATED),
  "umt5": ("UMT5", T5 | GATED),
  "t5gemma": ("T5Gemma", {"encoder": GEMMA2, "decoder": GEMMA2}),
  "t5gemma2": ("T5Gemma2", dict.fromkeys(("encoder", "decoder"), GEMMA3 | TWO_LAYERS)),
  "llama": ("Llama", LLAMA),
  "llama3": ("Llama", LLAMA | {"rope_parameters": LLAMA3}),
  "qwen2": todays_models.SHAPES["qwen2"],
  "qwen3": todays_models.SHAPES["qwen3"],
  "gemma2": ("Gemma2", GEMMA2),
  "gemma3": ("Gemma3Text", GEMMA3 | {"num_hidden_layers": 7}),
  "gpt2": ("GPT2", LLAMA | {"eos_token_id": 5}),
}
_QUICK = ("t5 1.1", "qwen3")
# CTranslate2 does not know the vector that T5Gemma 2 has for the end of an image.
INPUTS = [[min(token, 30) for token in row] for row in todays_models.INPUTS]


@pytest.fixture(scope="module")
def spiece_model(tmp_path_factory):
  words = [f"{a}{b}" for a in "abcdefghijklmnopqr" for b in "stuvwxyz"]
  path = tmp_path_factory.mktemp("vocabulary") / "spiece.model"
  path.write_bytes(train_sentencepiece([" ".join(words)] * 50, 45))
  return path


@pytest.fixture
def word_tokenizer(tmp_path):
  """Returns a folder with the tokenizer of a decoder."""
  names = {f"w{number}": number for number in range(todays_models.VOCAB)}
  path = tmp_path / "tokenizer"
  path.mkdir()
  Tokenizer(WordLevel(names, unk_token="w1")).save(str(path / "tokenizer.json"))
  special = {"pad": "w0", "unk": "w1", "bos": "w2", "eos": "w3"}
  about = {"tokenizer_class": "PreTrainedTokenizerFast"}
  about |= {f"{name}_token": token for name, token in special.items()}
  (path / "tokenizer_config.json").write_text(json.dumps(about))
  return path


def generate(folder, is_decoder, start, suppresses_padding):
  """Returns the tokens that CTranslate2 generates for INPUTS."""
  (file,) = (path for path in folder.iterdir() if "vocabulary" in path.name)
  names = json.loads(file.read_text())
  options = {"max_length" if is_decoder else "max_decoding_length": NEW_TOKENS, "end_token": []}
  if suppresses_padding:
    options["suppress_sequences"] = [names[:1]]
  if is_decoder:
    generator = ctranslate2.Generator(str(folder), compute_type="float32")
    rows = [[names[token] for token in [start, *row]] for row in INPUTS]
    options["include_prompt_in_result"] = False
    results = [result for row in rows for result in generator.generate_batch([row], **options)]
    return [result.sequences_ids[0] for result in results]
  translator = ctranslate2.Translator(str(folder), compute_type="float32")
  rows = [[names[token] for token in row] for row in INPUTS]
  options["beam_size"] = 1
  results = [result for row in rows for result in translator.translate_batch([row], **options)]
  return [[names.index(name) for name in result.hypotheses[0]] for result in results]


@pytest.mark.parametrize(
  "name", [pytest.param(x, marks=[] if x in _QUICK else pytest.mark.slow) for x in MODELS]
)
def test_greedy_tokens_of_a_written_folder_are_equal(name, tmp_path, spiece_model, word_tokenizer):
  kind, entries = MODELS[name]
  todays_models.save_model(kind, entries, tmp_path / "theirs")
  tokenizer = spiece_model if kind.endswith("T5") else word_tokenizer
  checkpoint = convert(tmp_path / "theirs", tmp_path / "t5x", "t5x")
  written = convert(checkpoint, tmp_path / "hf", "hf", tokenizer=tokenizer)
  converter = ctranslate2.converters.TransformersConverter(str(written))
  converter.convert(str(tmp_path / "ctranslate2"))
  found = todays_models.read(written)
  tokens = generate(
    tmp_path / "ctranslate2",
    found.settings.is_decoder,
    todays_models.start_of(written),
    suppresses_padding=not found.shift,
  )
  assert tokens == todays_models.decode(found, INPUTS, NEW_TOKENS)
