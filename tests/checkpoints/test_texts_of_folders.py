"""`infer` writes what Transformers generates for texts and conversations, from folders of today's families.

The tokenizers have the forms of published ones; what begins and ends a text follows from their files.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import gin
import numpy as np
import pytest
import todays_models
from transformers_chats import CHATML, HEADERS, TURNS
from transformers_tokenizers import write_folder

from rosetta_t5 import cli
from rosetta_t5.data import tokenizer_vocabulary
from rosetta_t5.data.pipeline.model_features import TaskFeatureConverter
from rosetta_t5.data.tensorflow_import import import_seqio, import_tensorflow

torch = pytest.importorskip("torch", reason="Transformers needs PyTorch")
transformers = pytest.importorskip("transformers", minversion="5.24", reason="is the oracle")

TOKENS = 12
TEXTS = ["hello wor! ld", "aba cab  x"]
TURN = [("user", "abc?"), ("assistant", "cab"), ("user", "bac")]
CHAT = [{"role": role, "content": text} for role, text in TURN]
# The shape of the model → the tokenizer, the template, and the token that ends turns.
CASES = {
  "llama": ("llama", HEADERS, "<|eot_id|>"),
  "qwen3": ("qwen", CHATML, "<|im_end|>"),
  "gemma3": ("gemma", TURNS, "<end_of_turn>"),
  "t5gemma": ("gemma", TURNS, "<end_of_turn>"),
}


@pytest.fixture(autouse=True)
def empty_gin(monkeypatch):
  monkeypatch.setattr("rosetta_t5.parallel.process_settings.enable_compilation_cache", lambda: None)
  yield
  gin.clear_config()


def save(shape: str, folder: pathlib.Path, monkeypatch: Any) -> tuple[Any, Any]:
  """Writes a folder, and returns Transformers' model and tokenizer."""
  case, template, _ = CASES[shape]
  write_folder(case, folder)
  (folder / "chat_template.jinja").write_text(template)
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  sizes = todays_models.SIZES | {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
  names = [f"{name}_token_id" for name in ("bos", "eos", "pad")]
  ids = {name: getattr(tokenizer, name) for name in names}
  if case == "qwen":
    ids["bos_token_id"] = ids["pad_token_id"]  # as in its config.json; its tokenizer has none
  kind, entries = todays_models.SHAPES[shape]
  changed = {k: x | ids if isinstance(x, dict) and "coder" in k else x for k, x in entries.items()}
  monkeypatch.setitem(todays_models.SHAPES, shape, (kind, changed | ids))
  monkeypatch.setattr(todays_models, "SIZES", sizes)
  monkeypatch.setattr(todays_models, "VOCAB", len(tokenizer))
  (folder / "config.json").unlink()
  todays_models.save(shape, folder)
  # --output_length replaces this limit.
  (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 2 * TOKENS}))
  config = transformers.AutoConfig.from_pretrained(folder)
  kinds = transformers.AutoModelForSeq2SeqLM, transformers.AutoModelForCausalLM
  model = kinds[shape != "t5gemma"].from_pretrained(folder, attn_implementation="eager")
  assert config.eos_token_id == tokenizer.eos_token_id
  return model.eval(), tokenizer


@pytest.mark.parametrize("shape", CASES)
def test_infer_answers_texts_and_conversations_as_transformers_does(shape, tmp_path, monkeypatch):
  model, tokenizer = save(shape, tmp_path / "model", monkeypatch)
  is_decoder = shape != "t5gemma"

  def generate(ids: list[int], end: str) -> str:
    start = {} if is_decoder else {"decoder_start_token_id": tokenizer.bos_token_id}
    (row,) = model.generate(
      torch.tensor([ids]),
      do_sample=False,
      max_new_tokens=TOKENS,
      eos_token_id=tokenizer.convert_tokens_to_ids(end),
      **start,
    )
    new = row[len(ids) if is_decoder else 1 :]
    return tokenizer.decode(new, skip_special_tokens=True).strip()

  expected = [generate(tokenizer(text)["input_ids"], tokenizer.eos_token) for text in TEXTS]
  options = {"add_generation_prompt": True, "return_dict": False}
  expected.append(generate(tokenizer.apply_chat_template(CHAT, **options), CASES[shape][2]))
  (tmp_path / "texts").write_text("\n".join(TEXTS))
  (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}))
  predictions = []
  for name in ("texts", "chats.jsonl"):
    arguments = ["--model_dir", tmp_path / "model", "--input", tmp_path / name]
    arguments += ["--output", tmp_path / f"{name}.out", "--input_length", 160]
    arguments += ["--output_length", TOKENS]
    assert cli.main(["infer", *map(str, arguments)]) == 0
    rows = (tmp_path / f"{name}.out").read_text().splitlines()
    predictions += [json.loads(row)["prediction"].strip() for row in rows]
  assert predictions == expected


def best_of_beams(model: Any, ids: list[int], ends: list[int], beams: int) -> list[int]:
  """Returns the best of T5X's beam search with the logits of Transformers.

  Transformers' own search ignores an end that is not among the best candidates; T5X's does not.
  """
  live: list[tuple[float, list[int]]] = [(0.0, [])]
  finished = []
  for _ in range(TOKENS):
    with torch.no_grad():
      logits = model(torch.tensor([ids + new for _, new in live])).logits[:, -1]
    rows = zip(live, logits.log_softmax(-1).tolist(), strict=True)
    grown = [(p + q, [*new, n]) for (p, new), row in rows for n, q in enumerate(row)]
    best = sorted(grown, reverse=True)[: (1 + len(ends)) * beams]
    finished += [x for x in best if x[1][-1] in ends]
    live = [x for x in best if x[1][-1] not in ends][:beams]
  return max(finished or live)[1]


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("shape", ["llama", "gemma3"])
def test_a_text_ends_at_each_end_token_of_the_folder(shape, beams, tmp_path, monkeypatch):
  model, tokenizer = save(shape, tmp_path / "model", monkeypatch)
  options = {"max_new_tokens": TOKENS, "num_beams": beams, "length_penalty": 0.0}

  def generate(text: str, ends: list[int]) -> list[int]:
    ids = tokenizer(text)["input_ids"]
    if beams > 1:
      return best_of_beams(model, ids, ends, beams)
    row = model.generate(torch.tensor([ids]), do_sample=False, eos_token_id=ends, **options)[0]
    return row[len(ids) :].tolist()

  # A token that a text has without this end is its second end.
  ends = [tokenizer.eos_token_id]
  tokens = generate(TEXTS[0], ends)
  ends.append(tokens[4])
  generation = tmp_path / "model/generation_config.json"
  more = {"max_new_tokens": 2 * TOKENS, "eos_token_id": ends}  # --output_length replaces the first
  generation.write_text(json.dumps({**options, **more}))
  expected = [generate(text, ends) for text in TEXTS]
  assert expected[0][-1] == ends[1]
  assert len(expected[0]) < len(tokens)
  (tmp_path / "texts").write_text("\n".join(TEXTS))
  arguments = ["--model_dir", tmp_path / "model", "--input", tmp_path / "texts"]
  arguments += ["--output", tmp_path / "out", "--input_length", 160, "--output_length", TOKENS]
  assert cli.main(["infer", *map(str, arguments)]) == 0
  rows = [json.loads(row)["prediction"] for row in (tmp_path / "out").read_text().splitlines()]
  texts = [tokenizer.decode(row, skip_special_tokens=True) for row in expected]
  assert [row.strip() for row in rows] == [text.strip() for text in texts]


@pytest.mark.parametrize("pack", [False, True])
def test_rows_without_a_start_token_have_the_logits_of_their_texts(pack, tmp_path, monkeypatch):
  model, _ = save("qwen3", tmp_path, monkeypatch)
  found = todays_models.read(tmp_path)
  vocabulary = tokenizer_vocabulary(str(tmp_path))
  seqio, tf = import_seqio(), import_tensorflow()
  texts = [vocabulary.encode(text) for text in TEXTS]
  rows = tf.data.Dataset.from_generator(
    lambda: iter({"targets": x} for x in texts),
    output_signature={"targets": tf.TensorSpec([None], tf.int32)},
  )
  converter = seqio.DecoderFeatureConverter(pack=pack)
  convert = TaskFeatureConverter(converter, {"targets": seqio.Feature(vocabulary)})
  dataset = convert(rows, {"targets": 40 if pack else 20}).batch(2)
  batch = next(dataset.as_numpy_iterator())
  weights = batch.pop("decoder_loss_weights") > 0
  ours = todays_models.logits(found, batch, padding_never_follows=False)[weights]
  with torch.no_grad():
    theirs = [model(torch.tensor([[n - 1 for n in x]])).logits[0, :-1].numpy() for x in texts]
  np.testing.assert_allclose(ours, np.concatenate(theirs), rtol=0, atol=1e-4)
  targets = batch["decoder_target_tokens"][weights].tolist()
  assert targets == [n for text in texts for n in text[1:]]
