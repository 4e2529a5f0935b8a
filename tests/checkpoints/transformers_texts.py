"""Texts that Transformers generates from the folders of `transformers_folders`, with a tokenizer of words.

`fixtures/transformers_texts.json` has {case: {setting: texts}}. To record a version anew, run this file where
it is installed, after `transformers_folders.py`.
"""

from __future__ import annotations

import json
import pathlib
import tempfile

import transformers_folders

RECORDINGS = pathlib.Path(__file__).parent / "fixtures/transformers_texts.json"
PROMPTS = ["w9 w4 w17 w3 w26", "w8 w30 unknown w5"]
NEW_TOKENS = 7
# generation_config.json by name; those of beams are not compared, because T5X scores beams in another way.
SETTINGS = {
  "greedy": {},
  "controls": {
    "repetition_penalty": 1.7,
    "no_repeat_ngram_size": 2,
    "min_new_tokens": 5,
    "bad_words_ids": [[7], [12, 4]],
  },
}
CASES = ("t5", "t5-gated-silu", "t5-start", "madlad", "mt5", "umt5", "gpt2", "gpt_neo")


def write_folder(case, folder, setting="greedy", recorded=None):
  """Writes the folder of a case with a tokenizer.json, and generation_config.json."""
  from tokenizers import Tokenizer, models, pre_tokenizers, processors

  transformers_folders.write_folder(case, folder, recorded)
  folder = pathlib.Path(folder)
  config = json.loads((folder / "config.json").read_text())
  words = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{f"w{n}": n for n in range(3, 32)}}
  if is_decoder := not config.get("is_encoder_decoder"):
    words = {"<unk>": 0, **{f"w{n}": n for n in range(1, 31)}, "<end>": 31}
  tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
  tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  end = next(word for word, number in words.items() if number == config["eos_token_id"])
  template = [end, "$A"] if is_decoder else ["$A", end]
  tokenizer.post_processor = processors.TemplateProcessing(
    single=template, special_tokens=[(end, words[end])]
  )
  tokenizer.add_special_tokens([word for word in words if word.startswith("<")])
  tokenizer.save(str(folder / "tokenizer.json"))
  about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "unk_token": "<unk>"}
  (folder / "tokenizer_config.json").write_text(json.dumps(about))
  tokens = {k: v for k, v in config.items() if k.endswith("token_id")}
  if not is_decoder:
    tokens.setdefault("decoder_start_token_id", 0)
  length = {"max_new_tokens": NEW_TOKENS}
  (folder / "generation_config.json").write_text(json.dumps(tokens | length | SETTINGS[setting]))


def texts_of_transformers(folder):
  """Returns the texts that the installed Transformers generates for the prompts."""
  import torch
  import transformers

  config = json.loads((pathlib.Path(folder) / "config.json").read_text())
  model = getattr(transformers, config["architectures"][0]).from_pretrained(folder).eval()
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  texts = []
  for prompt in PROMPTS:
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    (output,) = model.generate(ids, do_sample=False)
    new = output[1 if config.get("is_encoder_decoder") else ids.shape[1] :]
    texts.append(tokenizer.decode(new, skip_special_tokens=True))
  return texts


def main():
  """Records all cases with the installed Transformers."""
  import transformers

  found = json.loads(RECORDINGS.read_text()) if RECORDINGS.exists() else {}
  for case in CASES:
    name, texts = f"{transformers.__version__}/{case}", {}
    for setting in SETTINGS:
      with tempfile.TemporaryDirectory() as folder:
        write_folder(name, folder, setting)
        texts[setting] = texts_of_transformers(folder)
    found[name] = texts
  RECORDINGS.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")


if __name__ == "__main__":
  main()
