"""`rosetta-t5 convert` and `ckpt`: every layout into every other, checked, and looked into."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import pytest

from rosetta_t5 import cli
from rosetta_t5.checkpoints.arrays.lazy_arrays import as_stored_array
from rosetta_t5.checkpoints.formats import orbax_writer
from rosetta_t5.checkpoints.reading import read_arrays
from rosetta_t5.conversion import convert, numpy_t5, verification
from rosetta_t5.conversion.sample_text import text_tokens

MESH_TF = pathlib.Path(__file__).parent / "fixtures/mesh_tf"


def run(*arguments):
  return cli.main([str(argument) for argument in arguments])


@pytest.mark.parametrize("to", ["t5x", "t5x-legacy"])
def test_whole_state_goes_into_t5x_s_layouts(tmp_path, capsys, to):
  assert run("convert", MESH_TF, tmp_path / "out", "--to", to) == 0
  assert "largest difference 0.0e+00" in capsys.readouterr().out
  before, after = read_arrays(MESH_TF), read_arrays(tmp_path / "out/checkpoint_1000")
  assert set(after) == set(before)
  for name, array in before.items():
    np.testing.assert_array_equal(after[name].get(), array.get(), err_msg=name)


def test_orbax_reads_what_is_written_without_it(tmp_path):
  import orbax.checkpoint as ocp
  from etils import epath

  arrays = read_arrays(MESH_TF)
  orbax_writer.write(tmp_path / "checkpoint_1", arrays)
  tree = ocp.PyTreeCheckpointHandler().restore(epath.Path(tmp_path / "checkpoint_1/state"))
  assert len(jax.tree.leaves(tree)) == len(arrays)
  np.testing.assert_array_equal(
    tree["target"]["token_embedder"]["embedding"], arrays["target/token_embedder/embedding"].get()
  )
  steps = ocp.CheckpointManager(
    tmp_path, options=ocp.CheckpointManagerOptions(step_prefix="checkpoint")
  ).all_steps()
  assert list(steps) == [1]


def test_scalable_tree_and_back_keeps_the_parameters(tmp_path):
  quiet = {"say": lambda _: None}
  scalable = convert.convert(MESH_TF, tmp_path / "a", "t5x-legacy", tree="scalable", **quiet)
  assert read_arrays(scalable)["target/encoder/encoder/attention/query/kernel"].shape == (
    8,
    2,
    2,
    4,
  )
  assert run("ckpt", "diff", MESH_TF, scalable) == 1, "the bias is shared there, each layer's here"
  encoder = convert.convert(scalable, tmp_path / "b", "hf", encoder_only=True, **quiet)
  config = json.loads((encoder / "config.json").read_text())
  assert (config["architectures"], config["is_encoder_decoder"]) == (["UMT5EncoderModel"], False)
  inputs = np.array([[5, 6, 7, 1, 0]])
  np.testing.assert_allclose(
    numpy_t5.encode(read_arrays(encoder), inputs),
    numpy_t5.encode(read_arrays(MESH_TF), inputs),
    atol=1e-6,
  )


def test_conversion_that_changes_the_model_fails_and_leaves_nothing(tmp_path, monkeypatch, capsys):
  written = convert.hugging_face_writer.weights

  def wrong(arrays, family):
    theirs = written(arrays, family)
    k, v = (f"encoder.block.0.layer.0.SelfAttention.{letter}.weight" for letter in "kv")
    return theirs | {k: theirs[v], v: theirs[k]}

  monkeypatch.setattr(convert.hugging_face_writer, "weights", wrong)
  assert run("convert", MESH_TF, tmp_path / "hf", "--to", "hf") == 1
  assert "the logits of real text differ by" in capsys.readouterr().err
  assert not (tmp_path / "hf").exists()


def test_destination_that_holds_something_is_left_alone(tmp_path, capsys):
  (tmp_path / "note").write_text("mine")
  assert run("convert", MESH_TF, tmp_path, "--to", "hf") == 1
  assert "is there already and not empty" in capsys.readouterr().err
  assert run("convert", tmp_path, tmp_path / "x", "--to", "hf") == 1
  assert "is not a checkpoint: the folder holds note" in capsys.readouterr().err


def test_weights_are_split_into_shards_and_stored_in_bfloat16(tmp_path):
  theirs = convert.hugging_face_writer.weights(
    {n: x for n, x in read_arrays(MESH_TF).items() if n.startswith("target/")}, "t5"
  )
  config = {"model_type": "t5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
  convert.hugging_face_writer.write(tmp_path, theirs, config, shard_bytes=3000)
  index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
  assert len(set(index["weight_map"].values())) > 3
  half = convert.convert(tmp_path, tmp_path / "half", "hf", dtype="bfloat16", say=lambda _: None)
  original, stored = read_arrays(MESH_TF), read_arrays(half)
  assert {x.dtype.name for x in stored.values()} == {"bfloat16"}
  name = "target/decoder/logits_dense/kernel"
  np.testing.assert_allclose(stored[name].get().astype(np.float32), original[name].get(), rtol=0.01)


def test_text_is_tokenised_below_the_vocabulary_s_size():
  for size in (32, 384, 32128):
    inputs, targets = text_tokens(size)
    assert targets[0, 0] == 0
    assert 0 < inputs.min() <= inputs.max() < size
    assert targets[0, 1:].min() > 0


def test_checkpoints_are_listed_shown_and_compared(tmp_path, capsys):
  checkpoint = convert.convert(MESH_TF, tmp_path, "t5x", say=lambda _: None)
  assert run("ckpt", "ls", tmp_path) == 0
  assert "1000" in capsys.readouterr().out
  assert run("ckpt", "show", tmp_path) == 0
  out = capsys.readouterr().out
  assert "target/token_embedder/embedding" in out
  assert "32 x 8  float32" in out
  assert "step 1000" in out
  assert "state/param_states" not in out
  assert run("ckpt", "diff", MESH_TF, checkpoint) == 0
  assert "52 parameters are equal, 0 differ" in capsys.readouterr().out


def test_verify_finds_changed_and_missing_values(tmp_path, capsys):
  checkpoint = convert.convert(MESH_TF, tmp_path, "t5x-legacy", say=lambda _: None)
  assert run("ckpt", "verify", tmp_path, "--write") == 0
  assert run("ckpt", "verify", tmp_path) == 0
  assert "compared with checksums.json, 0 problems" in capsys.readouterr().out
  other = checkpoint / "target.encoder.layers_0.mlp.wi_0.kernel/0.0"
  (checkpoint / "target.encoder.layers_0.mlp.wi_1.kernel/0.0").write_bytes(other.read_bytes())
  assert run("ckpt", "verify", tmp_path) == 1
  assert "wi_1/kernel is not what it was when its checksum was stored" in capsys.readouterr().out
  other.unlink()
  assert run("ckpt", "verify", tmp_path) == 1
  assert "wi_0/kernel cannot be read" in capsys.readouterr().out


def test_verify_without_stored_checksums_reads_everything_and_says_that_it_compared_nothing(
  tmp_path, capsys
):
  checkpoint = convert.convert(MESH_TF, tmp_path, "t5x-legacy", say=lambda _: None)
  assert run("ckpt", "verify", tmp_path) == 0
  assert "no checksums.json to compare with (verify --write), 0 problems" in capsys.readouterr().out
  assert not (checkpoint / "checksums.json").exists()
  damaged = checkpoint / "target.encoder.layers_0.mlp.wi_0.kernel/0.0"
  damaged.write_bytes(damaged.read_bytes()[:-9])
  assert run("ckpt", "verify", tmp_path) == 1
  said = capsys.readouterr().out
  assert "wi_0/kernel cannot be read" in said
  assert "1 problems" in said


def test_verify_finds_values_that_are_not_finite_without_stored_checksums(tmp_path, capsys):
  checkpoint = convert.convert(MESH_TF, tmp_path, "rosetta", say=lambda _: None)
  arrays = read_arrays(checkpoint)
  name = "target/encoder/layers_0/mlp/wi_0/kernel"
  arrays[name] = as_stored_array(np.full(arrays[name].shape, np.nan, np.float32))
  orbax_writer.write(tmp_path / "spoilt/checkpoint_1", arrays)
  assert run("ckpt", "verify", tmp_path / "spoilt") == 1
  size = arrays[name].size
  assert f"{name} holds {size} values that are not finite" in capsys.readouterr().out


def test_what_transformers_makes_of_a_converted_folder_is_compared_where_it_is_installed(
  tmp_path, capsys
):
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
  assert convert.main([str(tmp_path / "theirs"), str(tmp_path / "t5x"), "--to", "t5x"]) == 0
  assert convert.main([str(tmp_path / "t5x"), str(tmp_path / "ours"), "--to", "hf"]) == 0
  assert "logits of real text, by Transformers: largest difference" in capsys.readouterr().out


def test_gpt_s_folder_and_its_converted_one_are_equal_to_transformers(tmp_path, capsys):
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
  config = transformers.GPTNeoConfig(
    **sizes, attention_types=[[["global", "local"], 1]], window_size=5, vocab_size=96
  )
  theirs = transformers.GPTNeoForCausalLM(config).eval()
  theirs.save_pretrained(tmp_path / "theirs")
  assert convert.main([str(tmp_path / "theirs"), str(tmp_path / "ours"), "--to", "hf"]) == 0
  assert "logits of real text, by Transformers: largest difference" in capsys.readouterr().out
  ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
  ids = torch.arange(60)[None]
  assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_float64_decides_about_sharp_weights_in_transformers_too(tmp_path, capsys):
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
  assert convert.main([str(tmp_path / "theirs"), str(tmp_path / "ours"), "--to", "hf"]) == 0
  said = capsys.readouterr().out
  assert "in float32, " in said
  assert float(said.partition("in float32, ")[2].partition(" in float64")[0]) < 1e-8


def test_float64_decides_where_two_orders_of_float32_sums_differ():
  numbers = np.array([1e8, 1.0, -1e8, 1.0])

  def in_order(order):
    return lambda dtype: np.add.accumulate(numbers.astype(dtype)[order])[-1:]

  told = verification.compare("by hand", in_order([0, 1, 2, 3]), in_order([0, 2, 1, 3]))
  assert told.endswith("by hand: largest difference 1.0e+00 in float32, 0.0e+00 in float64")
  with pytest.raises(verification.ConversionError, match=r"by 1\.0e\+00 in float32 \(at most"):
    verification.compare("x", in_order([0, 1, 2, 3]), in_order([0, 2, 1, 3]), may_use_float64=False)
  with pytest.raises(
    verification.ConversionError, match=r"by 2\.0e\+00 in float32, 1\.0e\+00 in float64"
  ):
    verification.compare("x", in_order([0, 1, 2]), lambda dtype: dtype([2.0]))


def test_a_model_whose_forward_pass_is_not_known_is_compared_by_its_arrays(tmp_path, capsys):
  arrays = {
    n: x
    for n, x in read_arrays(MESH_TF).items()
    if not any(part in n for part in ("encoder", "relpos_bias"))
  }
  orbax_writer.write(tmp_path / "checkpoint_1", arrays)
  assert run("convert", tmp_path / "checkpoint_1", tmp_path / "out", "--to", "t5x-legacy") == 0
  assert "parameters are equal (no forward pass compared)" in capsys.readouterr().out
  name = "target/decoder/layers_0/mlp/wo/kernel"
  other = {**arrays, name: as_stored_array(arrays[name].get() + 1)}
  with pytest.raises(verification.ConversionError, match=f"1 parameters are not .* {name}"):
    verification.compare_arrays(arrays, other)


def test_a_decoder_that_is_no_gpt_is_refused_for_transformers_with_its_reasons(tmp_path, capsys):
  arrays = {n: x for n, x in read_arrays(MESH_TF).items() if "encoder" not in n}
  orbax_writer.write(tmp_path / "checkpoint_1", arrays)
  assert run("convert", tmp_path / "checkpoint_1", tmp_path / "hf", "--to", "hf") == 1
  said = capsys.readouterr().err
  for reason in (
    "is no GPT-2 and no GPT-Neo",
    "T5's relative bias (positions = 'relative')",
    "T5's norm (norm = 'rms')",
    "a gated feed-forward block",
    "no biases (use_bias = False)",
    "It can be written as t5x",
  ):
    assert reason in said
  assert not (tmp_path / "hf").exists()
