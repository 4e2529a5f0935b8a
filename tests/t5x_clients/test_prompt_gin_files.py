"""Gin files of T5X's prompt tuning, which import flaxformer and prompt_tuning, train and predict here.

The files below were written for this test, with the names that the published ones import and bind.
"""

from __future__ import annotations

import copy
import json
import os
import pathlib
import subprocess
import sys

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from tiny_tasks import PAIRS, byte_model, byte_vocabulary, save_checkpoints

from rosetta_t5.adapters.adapter import flat
from rosetta_t5.checkpoints.checkpoint_folders import read_arrays
from rosetta_t5.config import parse_gin_flags
from rosetta_t5.traced.program import with_config
from rosetta_t5.user_errors import ConfigError
from t5x.contrib.prompt_tuning import prompts

ROOT = pathlib.Path(__file__).parents[2]
PROMPT = "encoder/prompt/prompt/prompt"
LAYERS = """
from __gin__ import dynamic_registration
import seqio
from flax import linen
from flax import traverse_util
from flaxformer.architectures.t5 import t5_architecture
from flaxformer.components import dense
from flaxformer.components import embedding
from flaxformer.components import layer_norm
from flaxformer.components import relative_position_biases
from flaxformer.components.attention import dense_attention
from prompt_tuning.extended.train import ia3
from prompt_tuning import masks as prompt_masks
from prompt_tuning import prompts
from prompt_tuning.train import layers as prompt_layers
from prompt_tuning.train import optim as pt_optim
from prompt_tuning.train import prompts as train_prompts
from prompt_tuning.train import utils as prompt_utils
from t5x import adafactor
from t5x import models
from t5x import optimizers as optim
from t5x import utils

PROMPT_LENGTH = 6
DROPOUT_RATE = 0.0
DROPOUT_FACTORY = @linen.Dropout
linen.Dropout.rate = %DROPOUT_RATE
prompt_layers.PromptEncoderDecoder:
  encoder_factory = @prompt_layers.PromptEncoder
  decoder_factory = @t5_architecture.Decoder
  shared_token_embedder_factory = @embedding.Embed
  dtype = 'float32'
  encoder_mask_factory = @prompt_masks.create_prompt_encoder_mask
  add_fake_prompt_factory = @prompt_masks.add_fake_prompt
prompt_masks.create_prompt_encoder_mask.prompt_length = %PROMPT_LENGTH
prompt_masks.add_fake_prompt.prompt_length = %PROMPT_LENGTH
t5_architecture.EncoderDecoder:
  encoder_factory = @t5_architecture.Encoder
  decoder_factory = @t5_architecture.Decoder
  shared_token_embedder_factory = @embedding.Embed
prompt_layers.PromptEncoder:
  prompt_factory = @train_prompts.Prompt
  add_fake_prompt_factory = @prompt_masks.add_fake_prompt
  num_layers = 1
  layer_factory = @t5_architecture.EncoderLayer
  shared_relative_position_bias_factory = @relative_position_biases.RelativePositionBiases
t5_architecture.Encoder:
  num_layers = 1
  layer_factory = @t5_architecture.EncoderLayer
  shared_relative_position_bias_factory = @relative_position_biases.RelativePositionBiases
t5_architecture.EncoderLayer:
  attention = @dense_attention.MultiHeadDotProductAttention()
  mlp = @dense.MlpBlock()
  dropout_factory = %DROPOUT_FACTORY
  layer_norm_factory = @layer_norm.T5LayerNorm
t5_architecture.Decoder:
  num_layers = 1
  layer_factory = @t5_architecture.DecoderLayer
  shared_relative_position_bias_factory = @relative_position_biases.RelativePositionBiases
  output_logits_factory = @dense.DenseGeneral
t5_architecture.DecoderLayer:
  self_attention = @dense_attention.MultiHeadDotProductAttention()
  encoder_decoder_attention = @dense_attention.MultiHeadDotProductAttention()
  mlp = @dense.MlpBlock()
  dropout_factory = %DROPOUT_FACTORY
embedding.Embed:
  num_embeddings = 384
  features = 16
dense_attention.MultiHeadDotProductAttention:
  num_heads = 2
  head_dim = 8
  kernel_init = @linen.initializers.variance_scaling()
  dropout_rate = %DROPOUT_RATE
linen.initializers.variance_scaling:
  scale = 1.0
  mode = 'fan_in'
  distribution = 'normal'
relative_position_biases.RelativePositionBiases.num_heads = 2
dense.MlpBlock:
  intermediate_dim = 32
  activations = ('relu',)
  intermediate_dropout_rate = %DROPOUT_RATE
dense.DenseGeneral.features = 384
train_prompts.Prompt.prompt = @prompts.Prompt()
prompts.Prompt:
  length = %PROMPT_LENGTH
  prompt_init = @prompt_init/linen.initializers.uniform()
prompt_init/linen.initializers.uniform.scale = 0.5
"""
MODEL = """
ARCHITECTURE = @prompt_layers.PromptEncoderDecoder()
VOCABULARY = @seqio.ByteVocabulary()
MODEL = @models.EncoderDecoderModel()
models.EncoderDecoderModel:
  module = %ARCHITECTURE
  input_vocabulary = %VOCABULARY
  output_vocabulary = %VOCABULARY
  optimizer_def = @optim.MultiOptimizer()
adafactor.Adafactor:
  multiply_by_parameter_scale = False
  logical_factor_rules = @pt_optim.standard_logical_factor_rules()
optim.MultiOptimizer.traversals_and_optimizers = (
  (@traverse_util.ModelParamTraversal(), @adafactor.Adafactor()),)
traverse_util.ModelParamTraversal.filter_fn = @prompt_utils.match_any()
PROMPT_REGEX = [".*/prompt/.*"]
prompt_utils.match_any.regexes = %PROMPT_REGEX
utils.SaveCheckpointConfig.checkpointer_cls = @prompt_utils.Checkpointer
prompt_utils.Checkpointer.save_paths = %PROMPT_REGEX
utils.RestoreCheckpointConfig:
  fallback_to_scratch = True
  assignment_map = ((r"^.*prompt.*$", None),)
"""
FROM_CLASS_LABELS = """
prompts.Prompt.prompt_init = @prompt_init/prompts.from_embedded_list()
prompt_init/prompts.from_embedded_list:
  embeddings = @prompt_init/prompts.t5x_load()
  vocab = %VOCABULARY
  texts = ['yes', 'no']
  initializer = @prompt_init/prompts.from_sample_of_embeddings()
prompt_init/prompts.from_sample_of_embeddings:
  embeddings = @prompt_init/prompts.t5x_load()
  population_size = 50
prompt_init/prompts.t5x_load:
  checkpoint_path = %INITIAL_CHECKPOINT_PATH
  variable_path = "token_embedder/embedding"
"""
FINETUNE = """
from t5x import partitioning
from prompt_tuning.train import partitioning as prompt_partitioning
include 't5x/configs/runs/finetune.gin'
train/utils.DatasetConfig.pack = False
train_eval/utils.DatasetConfig.pack = False
utils.create_learning_rate_scheduler:
  factors = 'constant'
  base_learning_rate = 0.3
utils.SaveCheckpointConfig:
  period = 2
  keep = 1
partitioning.PjitPartitioner.logical_axis_rules = @partitioning.standard_logical_axis_rules()
partitioning.standard_logical_axis_rules.additional_rules = (
  @prompt_partitioning.standard_logical_axis_rules())
"""
INFER = """
import __main__ as infer_script
include 't5x/configs/runs/infer.gin'
infer_script.infer.fallback_init_rng = 0
infer_script.infer.mode = 'score'
utils.RestoreCheckpointConfig.dtype = 'float32'
"""
FROM_FILE = """
prompts.Prompt.prompt_init = @prompt_init/prompts.from_array()
prompt_init/prompts.from_array.prompt = @prompt_init/prompts.np_load()
prompt_init/prompts.np_load.path = %PROMPT_FILE
"""
TASKS = "from tiny_tasks import add_task\nadd_task('numbers')\n"


@pytest.fixture(autouse=True)
def empty_gin():
  gin.clear_config()
  yield
  gin.clear_config()


def module_of(tmp_path, architecture, text=LAYERS):
  (tmp_path / "layers.gin").write_text(text)
  bindings = [f"ARCHITECTURE = @{architecture}()"]
  parse_gin_flags([], [str(tmp_path / "layers.gin")], bindings, finalize_config=False)
  return copy.deepcopy(gin.query_parameter("%ARCHITECTURE"))  # gin calls @f() when it is copied


def params_of(module):
  ones = jnp.ones((2, 4), jnp.int32)
  variables = jax.eval_shape(lambda: module.init(jax.random.PRNGKey(0), ones, ones, ones))
  return {name: leaf.shape for name, leaf in flat(variables["params"]).items()}


def test_flaxformer_s_layers_make_the_network_of_t5x_with_a_prompt(tmp_path):
  assert params_of(module_of(tmp_path, "t5_architecture.EncoderDecoder")) == params_of(
    byte_model().module
  )
  module = module_of(tmp_path, "prompt_layers.PromptEncoderDecoder")
  assert params_of(module) == params_of(byte_model().module) | {PROMPT: (6, 16)}


def test_ia3_scales_keys_values_and_the_hidden_layer_of_every_block(tmp_path):
  text = (
    LAYERS
    + """
dense_attention.MultiHeadDotProductAttention:
  k_conv = @ia3.IA3Attention()
  v_conv = @ia3.IA3Attention()
dense.MlpBlock.intermediate_conv = @ia3.IA3()
"""
  )
  module = module_of(tmp_path, "t5_architecture.EncoderDecoder", text)
  added = params_of(module).items() - params_of(byte_model().module).items()
  decoder = [
    f"{name}/{part}"
    for name in ("self_attention", "encoder_decoder_attention")
    for part in ("key", "value")
  ]
  assert dict(added) == {
    "encoder/layers_0/attention/key/ia3_scaling": (16,),
    "encoder/layers_0/attention/value/ia3_scaling": (16,),
    **{f"decoder/layers_0/{name}/ia3_scaling": (16,) for name in decoder},
    **{f"{side}/layers_0/mlp/wo/ia3_scaling": (32,) for side in ("encoder", "decoder")},
  }


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("dense.MlpBlock.use_bias = True", "one dropout rate and no biases, as in T5"),
    ("dense.MlpBlock.intermediate_dropout_rate = 0.5", "one dropout rate and no biases, as in T5"),
    (
      "dense.MlpBlock.intermediate_conv = @ia3.IA3()",
      "set all of MultiHeadDotProductAttention.k_conv",
    ),
    (
      "t5_architecture.EncoderLayer.mlp = @ia3/dense.MlpBlock()\n"
      "ia3/dense.MlpBlock.intermediate_conv = @ia3.IA3()",
      "must have the same attention and mlp",
    ),
    ("dense.MlpBlock.precomputed = 1", "no argument 'precomputed'"),
  ],
)
def test_layers_that_t5_does_not_have_are_refused(tmp_path, line, message):
  with pytest.raises(ValueError, match=message):
    module_of(tmp_path, "t5_architecture.EncoderDecoder", f"{LAYERS}{line}\n")


@pytest.mark.parametrize("module", ["flaxformer.components.convolution", "prompt_tuning.data.glue"])
def test_modules_without_a_stand_in_are_reported_as_missing(tmp_path, module):
  with pytest.raises(ConfigError, match=f"there is no module '{module.partition('.')[0]}'"):
    module_of(tmp_path, "t5_architecture.EncoderDecoder", f"import {module}\n{LAYERS}")


TABLE = np.random.default_rng(0).normal(size=(384, 4)).astype(np.float32)
KEY = jax.random.PRNGKey(3)


def test_a_sample_of_embeddings_draws_other_rows_of_the_first_ones(tmp_path):
  np.save(tmp_path / "table.npy", TABLE)
  init = prompts.from_sample_of_embeddings(prompts.np_load(tmp_path / "table.npy"), 20)
  vectors = np.asarray(jax.jit(lambda key: init(key, (15, 4)))(KEY))  # as runs trace it
  rows = [np.flatnonzero((vector == TABLE).all(axis=1)).item() for vector in vectors]
  assert len(set(rows)) == 15
  assert max(rows) < 20
  assert init(KEY, (30, 4)).shape == (30, 4)


def test_labels_and_texts_replace_the_first_vectors():
  other = prompts.from_array(TABLE[:4])
  labels = prompts.from_embedded_list(TABLE, byte_vocabulary(), ["ab", "c"], other)
  a, b, c = (TABLE[ord(letter) + 3] for letter in "abc")  # three special tokens come before bytes
  np.testing.assert_allclose(labels(KEY, (4, 4)), [(a + b) / 2, c, TABLE[2], TABLE[3]])
  text = prompts.from_embedded_string(TABLE, byte_vocabulary(), "cab", other)
  np.testing.assert_array_equal(text(KEY, (4, 4)), [c, a, b, TABLE[3]])
  only = prompts.from_embedded_string(TABLE, byte_vocabulary(), "cab")
  np.testing.assert_array_equal(only(KEY, (2, 4)), [c, a])


def test_a_prompt_of_another_shape_is_refused():
  with pytest.raises(ValueError, match=r"has shape \(384, 4\), and the network needs \(100, 4\)"):
    prompts.from_array(TABLE)(KEY, (100, 4))


def start(folder, program, gin_text, **macros):
  (folder / "run.gin").write_text(gin_text)
  (folder / "prompt_tasks.py").write_text(TASKS)
  path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", folder)))
  lengths = {"inputs": 16, "targets": 12}
  macros |= {"MIXTURE_OR_TASK_NAME": "numbers", "MIXTURE_OR_TASK_MODULE": "prompt_tasks"}
  macros |= {"TASK_FEATURE_LENGTHS": lengths, "USE_CACHED_TASKS": False}
  flags = [f"--gin.{name}={value!r}" for name, value in macros.items()]
  done = subprocess.run(
    [sys.executable, "-m", program, f"--gin_file={folder}/run.gin", *flags],
    env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
    capture_output=True,
    text=True,
    cwd=folder,
  )
  assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_prompt_is_trained_alone_continued_and_used_from_its_file(tmp_path):
  base, run = tmp_path / "base", tmp_path / "run"
  save_checkpoints(base, [5])
  base /= "checkpoint_5"
  train = {"MODEL_DIR": str(run), "INITIAL_CHECKPOINT_PATH": str(base), "BATCH_SIZE": 8}
  train |= {"EVAL_STEPS": 1, "RANDOM_SEED": 0}
  text = LAYERS + MODEL + FROM_CLASS_LABELS + FINETUNE
  start(tmp_path, "t5x.train", text, TRAIN_STEPS=8, **train)
  start(tmp_path, "t5x.train", text, TRAIN_STEPS=10, **train)

  def vectors(step):
    name = PROMPT.replace("/", ".")
    return np.load(run / "numpy_checkpoints" / f"checkpoint_{step}" / name)

  before, after = read_arrays(base), read_arrays(run / "checkpoint_10")
  table = before["target/token_embedder/embedding"].get()
  labels = [table[byte_vocabulary().encode(text)].mean(axis=0) for text in ("yes", "no")]
  np.testing.assert_allclose(vectors(5)[:2], labels, rtol=1e-6)
  assert all((table[:50] == vector).all(axis=1).any() for vector in vectors(5)[2:])
  assert all(np.any(vectors(step) != vectors(step - 2)) for step in (8, 10) if step - 2 != 5)
  names = {name for name in after if name.startswith("target/")}
  assert names - before.keys() == {f"target/{PROMPT}"}
  for name in names & before.keys():
    np.testing.assert_array_equal(after[name].get(), before[name].get())
  states = {name.rpartition("/")[0] for name in after if "param_states" in name}
  assert states == {f"state/param_states/{PROMPT}"}
  np.testing.assert_array_equal(after[f"target/{PROMPT}"].get(), vectors(10))

  file = run / "numpy_checkpoints" / "checkpoint_10" / PROMPT.replace("/", ".")
  score = {
    "CHECKPOINT_PATH": str(base),
    "PROMPT_FILE": str(file),
    "INFER_OUTPUT_DIR": str(tmp_path),
  }
  start(tmp_path, "t5x.infer", LAYERS + MODEL + INFER + FROM_FILE, **score)
  lines = (tmp_path / "numbers-score.jsonl-00000-of-00001").read_text().splitlines()
  params = {name: jnp.asarray(after[name].get()) for name in names}
  params = unflatten_dict({n.removeprefix("target/"): x for n, x in params.items()}, sep="/")
  model = with_config(byte_model(), prompt_length=6)
  expected = model.score_batch(params, batch_of(PAIRS))
  np.testing.assert_allclose([json.loads(line)["score"] for line in lines], expected, rtol=1e-4)


def batch_of(pairs):
  def rows(texts, length):
    ids = [[*byte_vocabulary().encode(text), 1] for text in texts]
    return jnp.array([row + [0] * (length - len(row)) for row in ids])

  inputs, targets = zip(*pairs, strict=True)
  batch = {"encoder_input_tokens": rows(inputs, 16), "decoder_target_tokens": rows(targets, 12)}
  shifted = jnp.pad(batch["decoder_target_tokens"], ((0, 0), (1, 0)))[:, :-1]
  return {**batch, "decoder_input_tokens": shifted}
