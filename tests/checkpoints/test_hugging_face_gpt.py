"""Transformers' GPT-2 and GPT-Neo are read and written with the logits of an independent forward pass."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece
from safetensors.numpy import load_file, save_file

from rosetta_t5 import cli
from rosetta_t5.checkpoints.arrays.lazy_arrays import as_stored_array
from rosetta_t5.checkpoints.checkpoint_folders import read_arrays
from rosetta_t5.checkpoints.formats import t5x_layouts
from rosetta_t5.checkpoints.formats.hugging_face.families import gpt
from rosetta_t5.conversion import convert
from rosetta_t5.networks.transformer import DecoderWrapper, TransformerConfig
from t5x.checkpoints import load_t5x_checkpoint

LENGTH, WIDTH, HEADS, VOCAB, END = 12, 16, 4, 40, 39
CONFIGS = {
  "gpt2": {"model_type": "gpt2", "n_embd": WIDTH, "n_head": HEADS, "n_layer": 2}
  | {"n_positions": LENGTH, "vocab_size": VOCAB, "eos_token_id": END},
  "gpt_neo": {"model_type": "gpt_neo", "hidden_size": WIDTH, "num_heads": HEADS, "num_layers": 2}
  | {"max_position_embeddings": LENGTH, "vocab_size": VOCAB, "eos_token_id": END}
  | {"attention_types": [[["global", "local"], 1]], "window_size": 3},
}


def random_weights(kind):
  """Returns {Hugging Face's name: array}; GPT-2 keeps [in, out], GPT-Neo PyTorch's [out, in]."""
  rng = np.random.default_rng(0)
  shapes = {"wte.weight": (VOCAB, WIDTH), "wpe.weight": (LENGTH, WIDTH)}
  for layer in range(2):
    prefix = f"h.{layer}."
    matrices = {"mlp.c_fc": (WIDTH, 4 * WIDTH), "mlp.c_proj": (4 * WIDTH, WIDTH)}
    if kind == "gpt2":
      matrices |= {"attn.c_attn": (WIDTH, 3 * WIDTH), "attn.c_proj": (WIDTH, WIDTH)}
    else:
      names = ("q_proj", "k_proj", "v_proj", "out_proj")
      matrices |= {f"attn.attention.{name}": (WIDTH, WIDTH) for name in names}
    for name, shape in matrices.items():
      shapes[f"{prefix}{name}.weight"] = shape if kind == "gpt2" else shape[::-1]
      if not re.search(r"[qkv]_proj", name):
        shapes[f"{prefix}{name}.bias"] = shape[1:]
    for norm in ("ln_1", "ln_2"):
      shapes |= {f"{prefix}{norm}.{leaf}": (WIDTH,) for leaf in ("weight", "bias")}
  shapes |= {f"ln_f.{leaf}": (WIDTH,) for leaf in ("weight", "bias")}
  return {name: rng.normal(0, 0.3, s).astype(np.float32) for name, s in shapes.items()}


def forward(weights, ids, kind):
  """Returns GPT's logits [T, V] of one sequence of Hugging Face's ids."""
  w = {name: value.astype(np.float64) for name, value in weights.items()}

  def dense(x, name):
    kernel = w[f"{name}.weight"] if kind == "gpt2" else w[f"{name}.weight"].T
    return x @ kernel + w.get(f"{name}.bias", 0.0)

  def norm(x, name):
    centred = x - x.mean(-1, keepdims=True)
    root = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return centred / root * w[f"{name}.weight"] + w[f"{name}.bias"]

  def attention(x, prefix, window):
    if kind == "gpt2":
      q, k, v = np.split(dense(x, f"{prefix}attn.c_attn"), 3, axis=-1)
    else:
      q, k, v = (dense(x, f"{prefix}attn.attention.{name}_proj") for name in "qkv")
    q, k, v = (t.reshape(len(ids), HEADS, -1).transpose(1, 0, 2) for t in (q, k, v))
    logits = q @ k.transpose(0, 2, 1) / (np.sqrt(WIDTH / HEADS) if kind == "gpt2" else 1.0)
    distance = np.arange(len(ids))[:, None] - np.arange(len(ids))
    logits = np.where((distance >= 0) & (distance < window), logits, -np.inf)
    weight = np.exp(logits - logits.max(-1, keepdims=True))
    mixed = (weight / weight.sum(-1, keepdims=True)) @ v
    out = "attn.c_proj" if kind == "gpt2" else "attn.attention.out_proj"
    return dense(mixed.transpose(1, 0, 2).reshape(len(ids), WIDTH), prefix + out)

  x = w["wte.weight"][ids] + w["wpe.weight"][: len(ids)]
  for layer in range(2):
    window = 3 if kind == "gpt_neo" and layer == 1 else 10**9
    x = x + attention(norm(x, f"h.{layer}.ln_1"), f"h.{layer}.", window)
    h = dense(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc")
    h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    x = x + dense(h, f"h.{layer}.mlp.c_proj")
  return norm(x, "ln_f") @ w["wte.weight"].T


def write_folder(folder, kind, more=None):
  weights = random_weights(kind)
  # save_pretrained adds a prefix, and masks that are not weights.
  stored = {f"transformer.{name}": value for name, value in weights.items()}
  masks = "attn.bias" if kind == "gpt2" else "attn.attention.bias"
  stored[f"transformer.h.0.{masks}"] = np.ones((1, 1, LENGTH, LENGTH), np.float32)
  save_file(stored | (more or {}), folder / "model.safetensors")
  (folder / "config.json").write_text(json.dumps(CONFIGS[kind]))
  return weights


def our_logits(checkpoint, values, inputs):
  """Returns the network's logits for a checkpoint's parameters, without padding's."""
  params = jax.tree.map(jnp.asarray, load_t5x_checkpoint(checkpoint)["target"])
  module = DecoderWrapper(TransformerConfig(dropout_rate=0.0, **values))
  apply = jax.jit(lambda *a: module.apply({"params": params}, *a, enable_dropout=False))
  return apply(inputs, np.ones_like(inputs))[0, :, 1:]


def network_values(folder, **changes):
  """Returns the fields of TransformerConfig for a folder whose config.json has other entries."""
  config = json.loads((folder / "config.json").read_text()) | changes
  return gpt.network_settings(config, read_arrays(folder))


def some_ids():
  """Returns a text that begins with END as Transformers' ids and as ours."""
  ids = np.random.default_rng(1).integers(0, END, LENGTH)
  ids[0] = END
  return ids, np.where(np.arange(LENGTH) == 0, 0, ids + 1)[None].astype(np.int32)


@pytest.mark.one_quick_variant
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neo"])
def test_logits_of_a_folder_equal_those_of_an_independent_forward_pass(kind, tmp_path):
  weights = write_folder(tmp_path, kind)
  ids, inputs = some_ids()
  logits = our_logits(tmp_path, network_values(tmp_path), inputs)
  np.testing.assert_allclose(logits, forward(weights, ids, kind), rtol=1e-4, atol=1e-4)


def weights_in(folder):
  found = load_file(folder / "model.safetensors")
  return {name.removeprefix("transformer."): value for name, value in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neo"])
def test_a_conversion_to_t5x_and_back_keeps_arrays_and_config(kind, tmp_path):
  (tmp_path / "theirs").mkdir()
  weights = write_folder(tmp_path / "theirs", kind)
  convert.convert(tmp_path / "theirs", tmp_path / "t5x", "t5x")
  config = tmp_path / "theirs/config.json"
  back = convert.convert(tmp_path / "t5x", tmp_path / "hf", "hf", config=config)
  found = weights_in(back)
  assert found.keys() == weights.keys()
  for name, value in weights.items():
    np.testing.assert_array_equal(found[name], value, err_msg=name)
  after = json.loads((back / "config.json").read_text())
  assert {key: after[key] for key in CONFIGS[kind]} == CONFIGS[kind]


def write_run(folder, arrays, **values):
  """Writes a run's folder: a checkpoint and its config.gin."""
  t5x_layouts.write_orbax(folder / "checkpoint_3", arrays)
  lines = (f"network.TransformerConfig.{name} = {value!r}" for name, value in values.items())
  (folder / "config.gin").write_text("\n".join([*lines, "network.X.config = @Y()", ""]))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("kind", "to", "changes"),
  [
    ("gpt_neo", "gpt_neo", {}),
    ("gpt2", "gpt2", {"padding_never_follows": False}),
  ],
)
def test_a_trained_decoder_is_written_with_its_start_token_and_its_scaling(
  kind, to, changes, tmp_path
):
  write_folder(tmp_path, kind)
  arrays = read_arrays(tmp_path)
  name = "target/decoder/token_embedder/embedding"
  table = arrays[name].get()
  table[0] = table[7] / 2  # training has moved it away from END's
  values = network_values(tmp_path) | changes
  write_run(tmp_path / "run", {**arrays, name: as_stored_array(table)}, **values)
  folder = convert.convert(tmp_path / "run", tmp_path / "hf", "hf")
  config = json.loads((folder / "config.json").read_text())
  assert config["model_type"] == to
  assert config["vocab_size"] == VOCAB + 1
  ids, inputs = some_ids()
  if changes.get("padding_never_follows", True):
    assert (config["bos_token_id"], config["eos_token_id"]) == (VOCAB, VOCAB - 1)
    theirs, columns = np.where(ids == END, VOCAB, ids), slice(0, VOCAB)
  else:
    assert (config["pad_token_id"], config["bos_token_id"], config["eos_token_id"]) == (0, 0, 1)
    theirs, columns = inputs[0], slice(1, VOCAB + 1)
  expected = forward(weights_in(folder), theirs, kind)[:, columns]
  logits = our_logits(tmp_path / "run/checkpoint_3", values, inputs)
  np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
  again = our_logits(folder, network_values(folder), inputs)[:, :VOCAB]
  np.testing.assert_allclose(again, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_sentencepiece_vocabulary_is_written_as_tokenizer_json(tmp_path, capsys):
  write_folder(tmp_path, "gpt2")
  values = network_values(tmp_path) | {"padding_never_follows": False}
  write_run(tmp_path / "run", read_arrays(tmp_path), **values)
  (tmp_path / "t5").mkdir()  # A T5's tokenizer adds an end token and no start token.
  for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
    (tmp_path / "t5" / name).write_text('{"eos_token": "</of_t5>"}')
  options = {"pad_id": 0, "unk_id": 1, "eos_id": 2, "bos_id": -1, "hard_vocab_limit": False}
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["a text of few words"] * 9),
    vocab_size=24,
    model_prefix=str(tmp_path / "t5" / "spiece"),
    **options,
  )
  assert cli.main(["convert", *map(str, (tmp_path / "run", tmp_path / "bare")), "--to", "hf"]) == 0
  assert "no tokenizer was written" in capsys.readouterr().out
  command = ["convert", *map(str, (tmp_path / "run", tmp_path / "hf")), "--to", "hf"]
  assert cli.main([*command, "--tokenizer", str(tmp_path / "t5")]) == 0
  assert "no tokenizer was written" not in capsys.readouterr().out
  files = {file.name: file.read_text() for file in (tmp_path / "hf").glob("*.json")}
  assert not any("of_t5" in text for text in files.values())
  names = json.loads(files["tokenizer_config.json"])
  assert (names["bos_token"], names["pad_token"], names["eos_token"]) == ("<pad>", "<pad>", "</s>")
  config = json.loads(files["config.json"])
  assert (config["bos_token_id"], config["pad_token_id"], config["eos_token_id"]) == (0, 0, 2)
  assert json.loads(files["tokenizer.json"])["model"]["vocab"][2] == ["</s>", 0.0]
  assert (tmp_path / "hf" / "spiece.model").read_bytes()


def test_an_end_token_that_starts_texts_and_is_not_in_the_vocabulary_can_still_be_generated(
  tmp_path,
):
  (tmp_path / "theirs").mkdir()
  write_folder(tmp_path / "theirs", "gpt2")
  (tmp_path / "theirs/vocab.json").write_text('{"<|endoftext|>": 0}')
  (tmp_path / "theirs/merges.txt").write_text("#version: 0.2\n")
  command = ["convert", *map(str, (tmp_path / "theirs", tmp_path / "hf")), "--to", "hf"]
  assert cli.main(command) == 0
  assert "suppress" not in "".join(file.read_text() for file in (tmp_path / "hf").glob("*.json"))


@pytest.mark.slow
def test_decoders_that_transformers_does_not_support_are_refused_and_nothing_is_left(
  tmp_path, capsys
):
  (tmp_path / "theirs").mkdir()
  write_folder(tmp_path / "theirs", "gpt2")
  arrays = read_arrays(tmp_path / "theirs")
  t5x_layouts.write_orbax(tmp_path / "bare/checkpoint_1", arrays)
  values = network_values(tmp_path / "theirs")
  for name, changes in (
    ("elu", {"mlp_activations": ("elu",)}),
    ("heads", {"num_heads": 2}),
    ("window", {"window": 3, "layer_pattern": ("global", "local"), "scale_queries": False}),
    ("divided", {"divide_tied_logits": True}),
  ):
    write_run(tmp_path / name, arrays, **values | changes)
  without_heads = {name: value for name, value in values.items() if name != "num_heads"}
  write_run(tmp_path / "without_heads", arrays, **without_heads)
  for source, more, text in (
    ("bare", [], "cannot be derived from its weights: set --config to the config.gin"),
    ("bare", ["--config", "no.json"], "--config no.json: there is no such file"),
    ("without_heads", [], "config.gin does not bind TransformerConfig.num_heads"),
    ("elu", [], "the activation must be one of "),
    (
      "heads",
      [],
      "num_heads * head_dim must be 16, got 2 * 4",
    ),
    (
      "window",
      [],
      "gpt_neo: the biases of queries, keys and values must be zero, but they are not",
    ),
    ("window", ["--model-type", "gpt2"], "window must be None, got 3"),
    ("divided", [], "gpt2: divide_tied_logits must be False, and scale_queries True only"),
  ):
    with pytest.raises(SystemExit):
      cli.main(["convert", str(tmp_path / source), str(tmp_path / "hf"), "--to", "hf", *more])
    assert text in capsys.readouterr().err
    assert not list(tmp_path.glob("hf*"))


def test_models_that_the_network_does_not_support_are_refused(tmp_path):
  for change, text in (
    (
      {"activation_function": "elu"},
      "activation_function must be one of 'relu', 'gelu_new', ",
    ),
    ({"num_heads": 3}, "num_heads must divide 16, the model's width, got 3"),
    (
      {"scale_attn_by_inverse_layer_idx": True},
      "scale_attn_by_inverse_layer_idx must be False, got True",
    ),
    (
      {"attention_types": [[["local", "global"], 3]]},
      "attention_types must name the kind of each of 2 layers, got 6",
    ),
  ):
    write_folder(tmp_path, "gpt_neo")
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["gpt_neo"] | change))
    with pytest.raises(ValueError, match=re.escape(text)):
      read_arrays(tmp_path)
  write_folder(tmp_path, "gpt2", {"h.0.rotary.freqs": np.zeros(3, np.float32)})
  with pytest.raises(
    ValueError, match=r"weights that gpt2 does not have: transformer\.h\.0\.rotary"
  ):
    load_t5x_checkpoint(tmp_path)
  weights = weights_in(tmp_path)
  del weights["h.0.rotary.freqs"], weights["h.1.mlp.c_fc.bias"]
  save_file(weights, tmp_path / "model.safetensors")
  with pytest.raises(
    ValueError, match=r"the folder lacks weights of its gpt2: transformer\.h\.1\.mlp\.c_fc\.bias"
  ):
    load_t5x_checkpoint(tmp_path)


def test_a_folder_whose_special_tokens_exceed_its_vocabulary_is_read(tmp_path):
  write_folder(tmp_path, "gpt2")
  config = CONFIGS["gpt2"] | {"bos_token_id": 50256, "eos_token_id": 50256}
  (tmp_path / "config.json").write_text(json.dumps(config))
  table = load_t5x_checkpoint(tmp_path)["target"]["decoder"]["token_embedder"]["embedding"]
  assert table.shape == (VOCAB + 1, WIDTH)
