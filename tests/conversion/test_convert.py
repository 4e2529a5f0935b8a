"""`rosetta-t5 convert` writes every layout from every other, and verifies the model."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
import numpy as np
import numpy_t5
import pytest
import sentencepiece
from flax.core import unfreeze
from flax.traverse_util import flatten_dict
from huggingface_hub import ModelCard
from tiny_models import T5_1_1, variables

from rosetta_t5 import adapters, cli
from rosetta_t5.checkpoints import adapter_checkpoints
from rosetta_t5.checkpoints.arrays.lazy_arrays import as_stored_array, scale
from rosetta_t5.checkpoints.checkpoint_folders import read_arrays
from rosetta_t5.checkpoints.formats import t5x_layouts
from rosetta_t5.checkpoints.formats.hugging_face import folder
from rosetta_t5.checkpoints.formats.hugging_face.families import t5
from rosetta_t5.conversion import convert, verification
from rosetta_t5.conversion.model_settings import ModelSettings
from rosetta_t5.networks.transformer import Transformer

MESH_TF = pathlib.Path(__file__).parents[1] / "checkpoints/fixtures/mesh_tf"


def run(*arguments):
  try:
    return cli.main([str(argument) for argument in arguments])
  except SystemExit as ended:
    return ended.code


@pytest.mark.slow
@pytest.mark.parametrize("to", ["t5x", "t5x-legacy"])
def test_the_whole_state_is_written_in_t5x_layouts(tmp_path, capsys, to):
  assert run("convert", MESH_TF, tmp_path / "out", "--to", to) == 0
  assert "arrays were read again, one by one, and are equal" in capsys.readouterr().out
  before, after = read_arrays(MESH_TF), read_arrays(tmp_path / "out/checkpoint_1000")
  assert set(after) == set(before)
  for name, array in before.items():
    np.testing.assert_array_equal(after[name].get(), array.get(), err_msg=name)


@pytest.mark.slow
def test_orbax_reads_the_checkpoint_that_is_written_without_it(tmp_path):
  import orbax.checkpoint as ocp
  from etils import epath

  arrays = read_arrays(MESH_TF)
  t5x_layouts.write_orbax(tmp_path / "checkpoint_1000", arrays)
  tree = ocp.PyTreeCheckpointHandler().restore(epath.Path(tmp_path / "checkpoint_1000/state"))
  assert len(jax.tree.leaves(tree)) == len(arrays)
  np.testing.assert_array_equal(
    tree["target"]["token_embedder"]["embedding"], arrays["target/token_embedder/embedding"].get()
  )
  steps = ocp.CheckpointManager(
    tmp_path, options=ocp.CheckpointManagerOptions(step_prefix="checkpoint")
  ).all_steps()
  assert list(steps) == [1000]


@pytest.mark.parametrize("name", ["a%20b", "what?", "a b"])
def test_paths_with_the_special_characters_of_urls_are_written_and_read(tmp_path, name):
  arrays = {"target/kernel": as_stored_array(np.ones((2, 3), np.float32))}
  t5x_layouts.write_orbax(tmp_path / name / "checkpoint_1000", arrays)
  assert [folder.name for folder in tmp_path.iterdir()] == [name]
  read = read_arrays(tmp_path / name / "checkpoint_1000")
  np.testing.assert_array_equal(read["target/kernel"].get(), arrays["target/kernel"].get())


@pytest.mark.slow
def test_a_conversion_to_the_scalable_tree_and_back_keeps_the_parameters(tmp_path):
  scalable = convert.convert(MESH_TF, tmp_path / "a", "t5x-legacy", tree="scalable")
  assert read_arrays(scalable)["target/encoder/encoder/attention/query/kernel"].shape == (
    8,
    2,
    2,
    4,
  )
  assert run("ckpt", "diff", MESH_TF, scalable) == 1, (
    "the layers share the bias there, and have one each here"
  )
  encoder = convert.convert(scalable, tmp_path / "b", "hf", encoder_only=True)
  card = ModelCard.load(encoder / "README.md")
  assert card.data.to_dict() == {
    "library_name": "transformers",
    "tags": ["umt5", "rosetta-t5"],
  }
  assert "largest difference" in card.text
  config = json.loads((encoder / "config.json").read_text())
  assert (config["architectures"], config["is_encoder_decoder"]) == (["UMT5EncoderModel"], False)
  inputs = np.array([[5, 6, 7, 1, 0]])
  np.testing.assert_allclose(
    numpy_t5.encode(read_arrays(encoder), inputs),
    numpy_t5.encode(read_arrays(MESH_TF), inputs),
    atol=1e-6,
  )


@pytest.mark.slow
def test_a_conversion_that_changes_the_model_fails_and_leaves_nothing(
  tmp_path, monkeypatch, capsys
):
  correct = t5.make_weights

  def wrong(arrays, config):
    theirs = correct(arrays, config)
    k, v = (f"encoder.block.0.layer.0.SelfAttention.{letter}.weight" for letter in "kv")
    return theirs | {k: theirs[v], v: theirs[k]}

  monkeypatch.setattr(t5, "make_weights", wrong)
  assert run("convert", MESH_TF, tmp_path / "hf", "--to", "hf") == 1
  assert "the logits of the source and of what was written differ by" in capsys.readouterr().err
  assert not (tmp_path / "hf").exists()


def test_a_destination_that_is_not_empty_is_not_changed(tmp_path, capsys):
  (tmp_path / "note").write_text("mine")
  assert run("convert", MESH_TF, tmp_path, "--to", "hf") == 1
  assert "exists and is not empty" in capsys.readouterr().err
  assert run("convert", tmp_path, tmp_path / "x", "--to", "hf") == 1
  assert "is not a checkpoint: the folder contains note" in capsys.readouterr().err


@pytest.mark.slow
def test_weights_are_split_into_shards_and_converted_to_bfloat16(tmp_path, monkeypatch):
  monkeypatch.setattr(folder, "_SHARD_BYTES", 3000)
  convert.convert(MESH_TF, tmp_path, "hf")
  index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
  assert len(set(index["weight_map"].values())) > 3
  (tmp_path / "README.md").write_text("---\nlicense: mit\nlanguage: [de, fr]\n---\nText")
  half = convert.convert(tmp_path, tmp_path / "half", "hf", dtype="bfloat16")
  data = ModelCard.load(half / "README.md").data
  assert (data.license, data.language) == ("mit", ["de", "fr"])
  original, stored = read_arrays(MESH_TF), read_arrays(half)
  assert {x.dtype.name for x in stored.values()} == {"bfloat16"}
  name = "target/decoder/logits_dense/kernel"
  np.testing.assert_allclose(stored[name].get().astype(np.float32), original[name].get(), rtol=0.01)


def test_a_converted_folder_is_compared_with_transformers_where_it_is_installed(tmp_path, capsys):
  pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  config = transformers.T5Config(
    d_model=16,
    d_kv=4,
    num_heads=4,
    d_ff=24,
    num_layers=1,
    vocab_size=96,
    feed_forward_proj="gated-gelu",
    tie_word_embeddings=False,
  )
  transformers.T5ForConditionalGeneration(config).save_pretrained(
    tmp_path / "theirs", max_shard_size="8KB"
  )
  assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
  assert cli.main(["convert", str(tmp_path / "theirs"), str(tmp_path / "t5x"), "--to", "t5x"]) == 0
  assert cli.main(["convert", str(tmp_path / "t5x"), str(tmp_path / "ours"), "--to", "hf"]) == 0
  assert " tokens, by Transformers " in capsys.readouterr().out


def test_a_gpt_folder_converted_to_itself_gives_the_same_logits_in_transformers(tmp_path, capsys):
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
  config = transformers.GPTNeoConfig(
    **sizes, attention_types=[[["global", "local"], 1]], window_size=5, vocab_size=96
  )
  theirs = transformers.GPTNeoForCausalLM(config).eval()
  theirs.save_pretrained(tmp_path / "theirs")
  assert cli.main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--to", "hf"]) == 0
  assert " tokens, by Transformers " in capsys.readouterr().out
  ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
  ids = torch.arange(60)[None]
  assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_sharp_weights_may_differ_by_a_multiple_of_what_rounding_changes(tmp_path, capsys):
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  torch.manual_seed(0)
  sizes = {"d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 128, "num_layers": 4}
  config = transformers.T5Config(
    **sizes, vocab_size=384, feed_forward_proj="gated-gelu", tie_word_embeddings=False
  )
  theirs = transformers.T5ForConditionalGeneration(config)
  for parameter in theirs.parameters():
    if parameter.ndim > 1:
      torch.nn.init.normal_(parameter, 0, 0.6)
  theirs.save_pretrained(tmp_path / "theirs")
  assert cli.main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--to", "hf"]) == 0
  assert "if the parameters are rounded differently" in capsys.readouterr().out


def test_a_merge_into_sharp_weights_may_differ_by_a_multiple_of_what_rounding_changes():
  adapter, random = adapters.LoRA(targets="all-linear"), np.random.default_rng(0)
  network = dataclasses.replace(T5_1_1, num_encoder_layers=4, num_decoder_layers=4)
  params = adapter.with_added(unfreeze(variables(Transformer(network))))["params"]
  before = {
    f"target/{name}": as_stored_array(random.normal(0, 1.0, x.shape).astype(np.float32))
    for name, x in flatten_dict(params, sep="/").items()
  }
  after = adapter_checkpoints.merge(before, adapter.settings())
  settings = ModelSettings(network, {})
  result = verification.compare_networks((before, adapter), (after, None), settings)
  assert "if the parameters are rounded differently" in result
  wrong = max(name for name in after if name.endswith("wo/kernel"))
  after[wrong] = scale(after[wrong], 1.1)
  with pytest.raises(verification.ConversionError, match="differ by too much"):
    verification.compare_networks((before, adapter), (after, None), settings)


def test_a_model_that_does_not_fit_into_memory_is_compared_array_by_array(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(verification, "_MEMORY_SHARE", 0.0)
  assert run("convert", MESH_TF, tmp_path / "hf", "--to", "hf") == 0
  output = capsys.readouterr().out
  assert "arrays were read again, one by one, and are equal" in output
  assert "cannot be seen" in output


@pytest.mark.slow
def test_a_model_with_an_unknown_forward_pass_is_compared_by_its_parameters(tmp_path, capsys):
  arrays = {
    n: x
    for n, x in read_arrays(MESH_TF).items()
    if not any(part in n for part in ("encoder", "relpos_bias"))
  }
  t5x_layouts.write_orbax(tmp_path / "checkpoint_1000", arrays)
  assert run("convert", tmp_path / "checkpoint_1000", tmp_path / "out", "--to", "t5x-legacy") == 0
  assert "and are equal. Logits were not compared" in capsys.readouterr().out
  name = "target/decoder/layers_0/mlp/wo/kernel"
  other = {**arrays, name: as_stored_array(arrays[name].get() + 1)}
  with pytest.raises(verification.ConversionError, match=f"1 parameters differ .* {name}"):
    verification.compare_arrays(arrays, other)


@pytest.mark.slow
def test_a_t5_without_relative_biases_is_not_written_for_transformers(tmp_path):
  arrays = {n: x for n, x in read_arrays(MESH_TF).items() if "relpos_bias" not in n}
  t5x_layouts.write_orbax(tmp_path / "checkpoint_1000", arrays)
  with pytest.raises(ValueError, match="needs the weights of a T5 with relative biases"):
    convert.convert(tmp_path / "checkpoint_1000", tmp_path / "hf", "hf")


def test_a_decoder_that_is_not_a_gpt_is_refused_for_transformers_with_all_reasons(tmp_path, capsys):
  arrays = {n: x for n, x in read_arrays(MESH_TF).items() if "encoder" not in n}
  t5x_layouts.write_orbax(tmp_path / "checkpoint_1000", arrays)
  assert run("convert", tmp_path / "checkpoint_1000", tmp_path / "hf", "--to", "hf") == 1
  output = capsys.readouterr().err
  for reason in (
    "GPT-2 or GPT-Neo, which have learned positions",
    "This one differs in target/decoder/decoder_norm/bias, ",
    "target/decoder/layers_0/mlp/wi/bias, ",
  ):
    assert reason in output
  assert not (tmp_path / "hf").exists()


@pytest.mark.slow
def test_the_end_token_of_a_run_is_that_of_its_vocabulary_and_mt5_stays_mt5(tmp_path):
  options = {"model_prefix": str(tmp_path / "own"), "vocab_size": 24, "hard_vocab_limit": False}
  rows = iter(["a text of few words"] * 9)
  sentencepiece.SentencePieceTrainer.train(sentence_iterator=rows, **options)  # its end is token 2
  own = convert.convert(MESH_TF, tmp_path / "own", "hf", tokenizer=tmp_path / "own.model")
  assert json.loads((own / "config.json").read_text())["eos_token_id"] == 2
  mt5 = MESH_TF.parent / "mt5_sharded"
  checkpoint = convert.convert(mt5, tmp_path / "t5x", "t5x")
  back = convert.convert(checkpoint, tmp_path / "back", "hf")
  assert json.loads((back / "config.json").read_text())["model_type"] == "mt5"
