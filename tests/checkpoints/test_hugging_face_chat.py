"""`chat`, and `infer` with rows of messages, use the chat template of a Hugging Face folder."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import gin
import pytest
from transformers_texts import NEW_TOKENS, write_folder

from rosetta_t5 import cli, data
from rosetta_t5.config.model_file import _copy_vocabulary, _use_copy
from rosetta_t5.data.pipeline.inference_data import default_preprocessors
from rosetta_t5.inference.text_inference import InferenceType, TextInference
from rosetta_t5.trained_model import open_model_dir

# Of words that the folder's tokenizer has, without a role of the system.
TEMPLATE = (
  "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no ' + m.role) }}"
  "{% endif %}{{ 'w1' if m.role == 'user' else 'w2' }} {{ m.content }} {{ eos_token }} {% endfor %}"
  "{% if add_generation_prompt %}w2 {% endif %}"
)
QUESTION = {"role": "user", "content": "w9 w4 w17"}


@pytest.fixture(autouse=True)
def empty_gin(monkeypatch):
  monkeypatch.setattr("rosetta_t5.parallel.process_settings.enable_compilation_cache", lambda: None)
  yield
  gin.clear_config()


@pytest.fixture(params=[pytest.param("4.57.6/gpt2", marks=pytest.mark.slow), "5.24.0/t5"])
def folder(request, tmp_path):
  write_folder(request.param, tmp_path / "model")
  (tmp_path / "model/chat_template.jinja").write_text(TEMPLATE)
  return tmp_path / "model"


def infer(folder: pathlib.Path, rows: list[Any], *options: str) -> list[dict[str, Any]]:
  number = len([*folder.parent.iterdir()])
  file, output = folder.parent / f"{number}.jsonl", folder.parent / f"{number}.out"
  file.write_text("\n".join(map(json.dumps, rows)))
  arguments = ["--model_dir", folder, "--input", file, "--output", output, *options]
  assert cli.main(["infer", *map(str, arguments)]) == 0
  return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.slow
def test_infer_and_chat_answer_conversations_by_the_template(folder, monkeypatch, capsys):
  end = (
    "<end>" if "gpt2" in json.loads((folder / "config.json").read_text())["model_type"] else "</s>"
  )
  (row,) = infer(folder, [{"messages": [QUESTION]}])
  assert row["inputs"] == {"messages": [QUESTION]}
  opened = open_model_dir(folder)
  lengths = {"inputs": 8, "targets": 8 if end == "<end>" else NEW_TOKENS}
  texts = TextInference(
    *(opened.model, opened.partitioner, opened.state_axes, 8, lengths), inputs_end=False
  )
  mode, prompt = InferenceType.PREDICT_WITH_AUX, f"w1 w9 w4 w17 {end} w2"
  ((_, prediction),), _ = texts.infer(mode, [prompt], default_preprocessors(), opened.state)
  assert row["prediction"] == prediction.decode().strip()
  second = [QUESTION, {"role": "assistant", "content": row["prediction"]}, QUESTION]
  known = {"from": "gpt", "value": "w3"}  # the answer of a row to train on
  answer, same = infer(folder, [{"conversations": turns} for turns in (second, [*second, known])])
  assert same["inputs"] == {"conversations": [*second, known]}
  assert same["prediction"] == answer["prediction"]
  with pytest.raises(SystemExit):
    infer(folder, [{"conversations": [known]}])
  assert "has no message before the assistant's" in capsys.readouterr().err
  typed = iter(["w9 w4 w17", "w9 w4 w17", ""])
  monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
  assert cli.main(["chat", str(folder)]) == 0
  printed = capsys.readouterr().out.splitlines()
  # The end of a conversation that is longer than the decoder's inputs is read.
  notes = ["note: only the last 8 tokens are read: see --input_length"] * (end == "<end>")
  first = ["Type a message. An empty line ends.", row["prediction"]]
  assert printed == [*first, *notes, answer["prediction"]]


def test_mistakes_in_conversations_are_named(folder, monkeypatch, capsys):
  def error(rows: list[Any]) -> str:
    with pytest.raises(SystemExit):
      infer(folder, rows)
    return capsys.readouterr().err

  assert "refuses a conversation with the roles system, user: no system" in error(
    [{"messages": [{"role": "system", "content": "w3"}, QUESTION]}]
  )
  assert "have columns: give the model's input, such as --template" in error([{"question": "w1"}])
  typed = iter(["w3", ""])
  monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
  cli.main(["chat", str(folder), "--system", "w5"])
  assert "no system" in capsys.readouterr().out
  (folder / "chat_template.jinja").unlink()
  data.vocabularies.tokenizer_folder.read_tokenizer_folder.cache_clear()
  assert "model has no chat template: put chat_template.jinja beside" in error(
    [{"messages": [QUESTION]}]
  )


def test_a_copy_of_the_vocabulary_keeps_the_template_and_the_special_tokens(folder, tmp_path):
  vocabulary = open_model_dir(folder).model.input_vocabulary
  shift = vocabulary.shift
  (tmp_path / "run").mkdir()
  (folder / "generation_config.json").write_text('{"num_beams": 2}')
  kept = _copy_vocabulary(str(folder), tmp_path / "run")
  folder.rename(tmp_path / "moved")
  file = _use_copy(tmp_path / "run", kept)
  copy = data.tokenizer_vocabulary(file, shift=shift)
  assert copy.folder.chat_template == TEMPLATE
  assert pathlib.Path(file).with_name("generation_config.json").read_text() == '{"num_beams": 2}'
  assert (copy.eos_id, copy.bos_id, copy.ends_inputs) == (
    vocabulary.eos_id,
    vocabulary.bos_id,
    vocabulary.ends_inputs,
  )
