"""Exported models equal the original: SavedModels from text to text, StableHLO with jax alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_tasks import PAIRS, add_task, byte_model, byte_vocabulary, save_checkpoints

from rosetta_t5.checkpoints import RestoreCheckpointConfig, restore_for_inference
from rosetta_t5.config import parse_gin_flags
from rosetta_t5.data.tensorflow_import import import_seqio, import_tensorflow
from rosetta_t5.export.functions import (
  create_batch_polymorphic_shapes,
  create_inference_function,
  create_preprocessor,
  create_preprocessor_from_task,
  load_stablehlo,
  write_stablehlo,
)
from rosetta_t5.export.saved_model import save, write_warmup_examples
from rosetta_t5.parallel import PjitPartitioner

LENGTHS = {"inputs": 16, "targets": 12}
TEXTS = [question for question, _ in PAIRS[:3]]


def features():
  feature = import_seqio().Feature(byte_vocabulary())
  return {"inputs": feature, "targets": feature}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  folder = tmp_path_factory.mktemp("run")
  save_checkpoints(folder, [4])
  return RestoreCheckpointConfig(str(folder / "checkpoint_4"), mode="specific")


def export(checkpoint, folder, mode="predict", **arguments):
  given = {"output_features": features(), "batch_size": None, "model_name": "tiny"}
  save(
    model=byte_model(),
    inference_mode=mode,
    restore_checkpoint_cfg=checkpoint,
    task_feature_lengths=LENGTHS,
    output_dir=str(folder),
    **{**given, **arguments},
  )


def original(checkpoint, mode="predict"):
  """Returns the features of TEXTS and the original model's outputs."""
  model = byte_model()
  state, _ = restore_for_inference(model, checkpoint, PjitPartitioner(num_partitions=1), LENGTHS)
  params = state.params
  preprocess, _ = create_preprocessor(None, features(), LENGTHS)
  batch = {
    n: jnp.asarray(x.numpy()) for n, x in preprocess(import_tensorflow().constant(TEXTS)).items()
  }
  function = create_inference_function(model=model, inference_mode=mode)
  return batch, jax.jit(function)(params, batch)


def run_without(packages, program):
  """Returns the JSON that a program prints in a process that cannot import these packages."""
  program = f"import json, sys\nsys.modules.update(dict.fromkeys({packages!r}))\n{program}"
  environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
  out = subprocess.run(
    [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
  )
  return json.loads(out.stdout)


def served(serve, texts):
  """Returns the outputs of a signature for texts in the order of the model, which the dict lacks."""
  outputs = serve(text_batch=import_tensorflow().constant(texts))
  return [outputs[f"output_{index}"] for index in range(len(outputs))]


LOAD_SAVED_MODEL = """
import tensorflow as tf
serve = tf.saved_model.load("{folder}").signatures["serving_default"]
results = []
for texts in {batches}:
  outputs = serve(text_batch=tf.constant(texts))
  texts = [text.hex() for text in outputs["output_0"].numpy()]
  results.append([texts, outputs["output_1"].numpy().tolist()])
print(json.dumps(results))
"""


@pytest.mark.slow
def test_tensorflow_alone_maps_texts_to_texts_for_any_batch_size(checkpoint, tmp_path):
  tf = import_tensorflow()
  export(checkpoint, tmp_path / "1", validation_examples=TEXTS)
  program = LOAD_SAVED_MODEL.format(folder=tmp_path / "1", batches=[TEXTS[:1], TEXTS])
  results = run_without(["jax", "flax", "seqio", "rosetta_t5"], program)
  _, (tokens, scores) = original(checkpoint)
  expected = [byte_vocabulary().decode_tf(row).numpy() for row in tf.constant(np.asarray(tokens))]
  for count, (texts, found) in zip((1, 3), results, strict=True):
    assert [bytes.fromhex(text) for text in texts] == expected[:count]
    np.testing.assert_allclose(found, scores[:count], rtol=1e-4)


@pytest.mark.slow
def test_saved_model_returns_the_beams_that_gin_configures(checkpoint, tmp_path, monkeypatch):
  """The lines of export.gin: num_decodes = %BEAM_SIZE and return_all_decodes = True."""
  method = "models.EncoderDecoderModel.predict_batch_with_aux"
  turn_on = "from __gin__ import dynamic_registration\nfrom t5x import models\n"
  beams = tmp_path / "beams.gin"
  beams.write_text(f"{turn_on}{method}:\n  num_decodes = 2\n  return_all_decodes = True\n")
  parse_gin_flags([], [str(beams)], [])
  bound = gin.get_configurable("EncoderDecoderModel")
  monkeypatch.setattr("tiny_tasks.EncoderDecoderModel", bound)
  tf = import_tensorflow()
  export(checkpoint, tmp_path / "1")
  serve = tf.saved_model.load(str(tmp_path / "1")).signatures["serving_default"]
  texts, scores = served(serve, TEXTS)
  _, (tokens, expected_scores) = original(checkpoint)
  gin.clear_config()
  assert tokens.shape == (3, 2, LENGTHS["targets"])
  vocabulary = byte_vocabulary()
  expected = [
    [vocabulary.decode_tf(tf.constant(t)).numpy() for t in row] for row in np.asarray(tokens)
  ]
  assert texts.numpy().tolist() == expected
  np.testing.assert_allclose(scores.numpy(), expected_scores, rtol=1e-4)
  assert (scores.numpy()[:, 0] <= scores.numpy()[:, 1]).all()  # the best last, as T5X has it


LOAD_STABLEHLO = """
import pathlib, jax.export, numpy as np
from safetensors.numpy import load_file
folder, params = pathlib.Path("{folder}"), {{}}
program = jax.export.deserialize(bytearray((folder / "program.stablehlo").read_bytes()))
for name, array in load_file(folder / "params.safetensors").items():
  *parents, last = name.split("/")
  node = params
  for parent in parents:
    node = node.setdefault(parent, {{}})
  node[last] = array
print(json.dumps(np.asarray(program.call(params, dict(np.load("{batch}")))[0]).tolist()))
"""


@pytest.mark.slow
def test_jax_alone_runs_the_stablehlo(checkpoint, tmp_path):
  export(checkpoint, tmp_path / "1", mode="score")
  batch, (scores,) = original(checkpoint, "score")
  np.savez(tmp_path / "batch.npz", **batch)
  folder = tmp_path / "1/stablehlo"
  program = LOAD_STABLEHLO.format(folder=folder, batch=tmp_path / "batch.npz")
  without = run_without(["tensorflow", "seqio", "flax", "rosetta_t5"], program)
  ours = load_stablehlo(folder)(batch)[0]
  np.testing.assert_allclose([without, ours], [scores, scores], rtol=1e-4)


@pytest.mark.slow
def test_bfloat16_parameters_are_stored_bit_for_bit(checkpoint, tmp_path):
  params = {"a": {"b": np.asarray(jnp.array([1.5, -2.25], jnp.bfloat16))}}
  shapes = {"x": jnp.zeros((2,), jnp.int32)}
  write_stablehlo(
    tmp_path, lambda p, f: (p["a"]["b"].astype(jnp.float32) * f["x"],), params, shapes
  )
  (got,) = load_stablehlo(tmp_path)({"x": jnp.array([2, 4], jnp.int32)})
  assert got.tolist() == [3.0, -9.0]


@pytest.mark.parametrize("name", ["program.stablehlo", "params.safetensors"])
@pytest.mark.parametrize(
  "content", [lambda old: old.replace(b"float32", b"float16"), lambda _: b""]
)
def test_a_changed_stablehlo_file_is_refused_by_name(name, content, tmp_path):
  params, shapes = {"a": np.ones(2, np.float32)}, {"x": jnp.zeros((2,))}
  write_stablehlo(tmp_path, lambda p, f: (p["a"] * f["x"],), params, shapes)
  old = (tmp_path / name).read_bytes()
  new = content(old)
  (tmp_path / name).write_bytes(new if new != old else old[:-9] + b"123456789")
  with pytest.raises(ValueError, match=str(tmp_path)):
    load_stablehlo(tmp_path)


def serialized_example(texts):
  train = import_tensorflow().train
  lists = {name: train.BytesList(value=[text.encode()]) for name, text in texts.items()}
  features = {name: train.Feature(bytes_list=values) for name, values in lists.items()}
  return train.Example(features=train.Features(feature=features)).SerializeToString()


def test_preprocessor_equals_the_feature_converter():
  tf = import_tensorflow()
  add_task("pairs_to_export")
  task = import_seqio().TaskRegistry.get("pairs_to_export")
  examples = task.get_dataset(LENGTHS, "test", shuffle=False)
  converted = byte_model().FEATURE_CONVERTER_CLS(pack=False)(examples, LENGTHS).batch(len(PAIRS))
  raw, (signature,) = create_preprocessor_from_task(
    len(PAIRS), {}, LENGTHS, model=byte_model(), task_name="pairs_to_export", run_precache=True
  )
  assert (signature.shape.as_list(), signature.name) == ([len(PAIRS)], "text_batch")
  made = raw(tf.constant([serialized_example({"inputs": a, "targets": b}) for a, b in PAIRS]))
  for name, values in converted.get_single_element().items():
    np.testing.assert_array_equal(made[name], values, err_msg=name)
  import_seqio().TaskRegistry.remove("pairs_to_export")
  preprocess, (signature,) = create_preprocessor(None, features(), LENGTHS, split_separator="|")
  assert (signature.shape.as_list(), signature.name) == ([None], "text_batch")
  made = preprocess(tf.constant([f"{question}|{answer}" for question, answer in PAIRS]))
  for name, values in converted.get_single_element().items():
    np.testing.assert_array_equal(made[name], values, err_msg=name)


def test_buckets_and_tokens():
  tf = import_tensorflow()
  buckets = {"inputs": [8, 16]}
  preprocess, _ = create_preprocessor(None, features(), LENGTHS, bucket_keys=buckets)
  assert preprocess(tf.constant(["abc"]))["encoder_input_tokens"].shape == (1, 8)
  assert preprocess(tf.constant(["abc", "abcdefgh"]))["encoder_input_tokens"].shape == (2, 16)
  preprocess, _ = create_preprocessor(None, features(), LENGTHS, bucket_keys={"inputs": [8, 4]})
  assert preprocess(tf.constant(["abcdefgh"]))["encoder_input_tokens"].shape == (1, 16)
  preprocess, (signature,) = create_preprocessor(2, features(), LENGTHS, tokenized_inputs=True)
  assert (signature.shape.as_list(), signature.dtype) == ([2, 16], tf.int32)


def test_shapes_are_symbolic_if_the_batch_size_is_unknown():
  open_fn, signature = create_preprocessor(None, features(), LENGTHS)
  shapes = create_batch_polymorphic_shapes(signature, open_fn, overrides={"x": "b, 3"})
  assert shapes["encoder_input_tokens"] == "b, ..."
  assert shapes["x"] == "b, 3"
  fixed_fn, signature = create_preprocessor(4, features(), LENGTHS)
  assert create_batch_polymorphic_shapes(signature, fixed_fn) is None


@pytest.mark.parametrize(
  ("arguments", "text"),
  [
    (
      {"mode": "predictions"},
      "inference_mode must be 'predict', 'score' or a CustomInferenceMode, got 'predictions'",
    ),
    ({"mixture_or_task_name": "x"}, "needs output_features or mixture_or_task_name, and not both"),
    ({"enable_xla": False}, "enable_xla = False is not possible with this jax"),
  ],
)
def test_invalid_arguments_are_rejected_before_anything_is_written(
  checkpoint, tmp_path, arguments, text
):
  with pytest.raises(ValueError, match=text):
    export(checkpoint, tmp_path / "1", **arguments)
  assert not (tmp_path / "1").exists()


def test_a_folder_with_a_subfolder_called_stablehlo_is_not_replaced(checkpoint, tmp_path):
  (tmp_path / "stablehlo").mkdir()
  with pytest.raises(ValueError, match="contains something else: set another one"):
    export(checkpoint, tmp_path, mode="predictions")


def test_errors_of_task_preprocessors_and_warmup_name_their_requirements(tmp_path):
  with pytest.raises(
    ValueError, match=r"set BATCH_SIZE .export_lib.save.batch_size. and tokenized_inputs = False"
  ):
    create_preprocessor_from_task(None, {}, LENGTHS, model=byte_model(), task_name="none")
  with pytest.raises(ValueError, match="pip install --no-deps tensorflow-serving-api"):
    write_warmup_examples(["x"], str(tmp_path), "tiny", "serving_default", batch_sizes=[1])
