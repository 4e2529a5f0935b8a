"""PEFT's folders compute here what PEFT computes, and folders that are written here do so there.

The oracle is PEFT with Transformers and PyTorch; without them these tests are skipped.
"""

from __future__ import annotations

import json
import warnings

import numpy as np
import peft_folders
import pytest
from peft_folders import BASES, METHODS, load_base, our_logits, save_adapter, their_logits
from safetensors.numpy import load_file, save_file

from rosetta_t5.adapters import LoRA
from rosetta_t5.checkpoints.arrays.lazy_arrays import as_stored_array
from rosetta_t5.checkpoints.formats.hugging_face import folder, peft_folder, peft_writing
from rosetta_t5.conversion.convert import convert

torch = pytest.importorskip("torch", reason="PEFT needs PyTorch")
peft = pytest.importorskip("peft", minversion="0.21", reason="is the oracle")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of Transformers, used by PEFT


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
  paths = {}
  for name in BASES:
    paths[name] = tmp_path_factory.mktemp("base")
    peft_folders.save_base(name, paths[name])
  return paths


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", BASES)
def test_an_adapter_computes_what_it_computes_in_peft_merged_or_not(bases, tmp_path, name, method):
  theirs = save_adapter(name, method, bases[name], tmp_path)
  expected = their_logits(theirs, bases[name])
  assert np.abs(expected - their_logits(load_base(name, bases[name]), bases[name])).max() > 0.05
  np.testing.assert_allclose(our_logits(tmp_path), expected, rtol=0, atol=1e-4)
  if method != "prompt":
    np.testing.assert_allclose(our_logits(tmp_path, is_merged=True), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", BASES)
def test_a_folder_that_is_written_here_has_the_same_logits_in_peft(bases, tmp_path, name, method):
  first, second = tmp_path / "first", tmp_path / "second"
  theirs = save_adapter(name, method, bases[name], first)
  adapter, arrays = peft_folder.read_with_base(first)
  second.mkdir()
  config = folder.read_config(bases[name] / "config.json")
  peft_writing.write(second, adapter, arrays, config, str(bases[name]))
  before, after = (load_file(x / peft_folder.WEIGHTS) for x in (first, second))
  assert before.keys() == after.keys()
  for key, tensor in before.items():
    # Of a prompt, the half that is not used is left out.
    np.testing.assert_allclose(after[key], tensor[: len(after[key])], rtol=1e-6)
  with warnings.catch_warnings():
    warnings.simplefilter("error", UserWarning)
    loaded = peft.PeftModel.from_pretrained(load_base(name, bases[name]), second).eval()
  expected = their_logits(theirs, bases[name])
  np.testing.assert_allclose(their_logits(loaded, bases[name]), expected, rtol=0, atol=1e-5)
  assert peft_folder.read_with_base(second)[0] == adapter


def _remove(path):
  (path / peft_folder.WEIGHTS).unlink()


def _pickle(path):
  (path / peft_folder.WEIGHTS).rename(path / "adapter_model.bin")


def _truncate(path):
  file = path / peft_folder.WEIGHTS
  file.write_bytes(file.read_bytes()[:-100])


def _drop_tensor(path):
  tensors = load_file(path / peft_folder.WEIGHTS)
  del tensors[next(name for name in tensors if name.endswith("lora_B.weight"))]
  save_file(tensors, path / peft_folder.WEIGHTS)


def _set(**entries):
  def change(path):
    settings = json.loads((path / peft_folder.CONFIG).read_text())
    (path / peft_folder.CONFIG).write_text(json.dumps(settings | entries))

  return change


@pytest.mark.parametrize(
  ("spoil", "message"),
  [
    (_remove, r"must contain adapter_model\.safetensors, got none"),
    (_pickle, r"got only adapter_model\.bin, a pickle"),
    (_truncate, r"adapter_model\.safetensors is damaged"),
    (_drop_tensor, r"must have the shapes .* the file is incomplete"),
    (
      _set(peft_type="VERA"),
      r"peft_type must be one of 'LORA', 'IA3', 'PROMPT_TUNING', got 'VERA'",
    ),
    (_set(bias="all"), r"sets bias = 'all', which changes what the adapter computes"),
    (_set(modules_to_save=["lm_head"]), r"sets modules_to_save = \['lm_head'\]"),
    (_set(kasa_config={"x": 1}, lora_bias=True), r"sets lora_bias = True, kasa_config"),
    (_set(init_lora_weights="pissa"), r"sets init_lora_weights = 'pissa'"),
    (_set(base_model_name_or_path="/nowhere"), r"adapter of the model '/nowhere'.*put the model's"),
  ],
)
def test_a_folder_that_cannot_be_used_is_refused_with_the_reason(bases, tmp_path, spoil, message):
  save_adapter("t5", "lora", bases["t5"], tmp_path)
  spoil(tmp_path)
  with pytest.raises(ValueError, match=message):
    peft_folder.read_with_base(tmp_path)


def test_unknown_keys_and_empty_ones_are_tolerated(bases, tmp_path):
  save_adapter("t5", "lora", bases["t5"], tmp_path)
  before = our_logits(tmp_path)
  _set(new_in_a_later_version=3, modules_to_save=[], runtime_config={"a": 1})(tmp_path)
  np.testing.assert_array_equal(our_logits(tmp_path), before)


@pytest.mark.parametrize("name", ["llama", "t5gemma"])
def test_an_adapter_of_another_base_is_refused(bases, tmp_path, name):
  save_adapter("t5", "lora", bases["t5"], tmp_path)
  _set(base_model_name_or_path=str(bases[name]))(tmp_path)
  with pytest.raises(ValueError, match="the tensors must be those of projections of the base"):
    peft_folder.read_with_base(tmp_path)


@pytest.mark.parametrize("name", BASES)
def test_conversion_merges_a_peft_folder_and_compares_logits_before_and_after(
  bases, tmp_path, name, capsys
):
  theirs = save_adapter(name, "lora", bases[name], tmp_path / "adapter")
  path = convert(tmp_path / "adapter", tmp_path / "hf", "hf")
  (line,) = (
    line for line in capsys.readouterr().out.splitlines() if "before and after the merge" in line
  )
  assert float(line.split()[-1]) < 1e-4
  expected = their_logits(theirs, bases[name])
  found = their_logits(load_base(name, path), bases[name])
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_kernels_that_gpt2_joins_may_have_different_adapters(bases, tmp_path):
  base = folder.read_arrays(bases["gpt2"])
  for dora in (False, True):
    adapter = LoRA(
      targets=("query", "value"), rank=3, alpha=5.0, dora=dora, rank_pattern={"value": 2}
    )
    random = np.random.default_rng(0)
    params = {name.removeprefix("target/"): x.get() for name, x in base.items()}
    added = {
      f"target/{name}": as_stored_array(random.normal(1, 0.3, x.shape).astype(np.float32))
      for name, x in adapter.added_values(params).items()
    }
    path = tmp_path / f"ours {dora}"
    path.mkdir()
    config = folder.read_config(bases["gpt2"] / "config.json")
    peft_writing.write(path, adapter, {**base, **added}, config, str(bases["gpt2"]))
    loaded = peft.PeftModel.from_pretrained(load_base("gpt2", bases["gpt2"]), path).eval()
    expected = peft_folders.logits_of(adapter, {**base, **added}, bases["gpt2"])
    found = their_logits(loaded, bases["gpt2"])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
