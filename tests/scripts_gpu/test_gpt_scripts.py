"""Pax's scripts: the commands that they run, and the errors that they report."""

from __future__ import annotations

import pathlib

import pytest

_SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts_gpu"


@pytest.mark.parametrize(
  "arguments", [("logs/gpt", "float32", "2", "3"), ("float32", "2", "3", "logs/gpt")]
)
def test_pretraining_accepts_both_argument_orders_of_pax(run, tmp_path, arguments):
  status, out, _ = run(
    "run_pile_singlenode.sh", str(tmp_path), "spm.model", *arguments, GPT_SIZE="tiny"
  )
  assert status == 0
  given = set(out.splitlines())
  assert given >= {
    "--gin_file=gin/examples/gpt_126m_pile_pretrain.gin",
    "--gin_file=gin/models/gpt/tiny.gin",
    f'--gin.MODEL_DIR="{tmp_path}/logs/gpt"',
    "--gin.BATCH_SIZE=6",
    '--gin.network.TransformerConfig.dtype="float32"',
    '--gin.seqio.SentencePieceVocabulary.sentencepiece_model_file="spm.model"',
    f"--tfds_data_dir={tmp_path}",
  }
  assert (tmp_path / "logs/gpt/pile_output.log").read_text() == out


_SWITCHES = {"TRANSPOSE_BS": "1", "FUSE_QKV": "0", "PACK": "0", "NUM_MICROBATCHES": "2"}


@pytest.mark.parametrize("script", ["run_pile_singlenode.sh", "run_pile_multinode.sh"])
def test_pretraining_accepts_the_switches_of_the_t5_scripts(run, tmp_path, script):
  status, out, err = run(script, str(tmp_path), "spm.model", SLURM_NTASKS="1", **_SWITCHES)
  assert status == 0, err
  assert set(out.splitlines()) >= {
    "--gin.network.TransformerConfig.transpose_batch_sequence=1",
    "--gin.network.TransformerConfig.fuse_qkv_params=0",
    "--gin.trainer.Trainer.num_microbatches=2",
    "--gin.train/utils.DatasetConfig.pack=0",
    "--gin.train_eval/utils.DatasetConfig.pack=0",
  }
  status, _, err = run(script, str(tmp_path), "spm.model", SLURM_NTASKS="1", TRANSPOSE_BS="yes")
  assert status == 2
  assert "TRANSPOSE_BS must be one of: 0 1, got 'yes'" in err


def test_lambada_is_evaluated_with_the_last_checkpoint_of_the_pretraining_run(run, tmp_path):
  arguments = (str(tmp_path), "spm.model", "run")
  status, _, err = run("run_lambada_singlenode.sh", *arguments)
  assert status == 2
  assert f"{tmp_path}/run has no checkpoint\n  Pretrain first: run_pile_singlenode.sh" in err
  (tmp_path / "run/checkpoint_20").mkdir(parents=True)
  status, out, _ = run("run_lambada_singlenode.sh", *arguments)
  assert status == 0
  assert set(out.splitlines()) >= {
    f'--gin.CHECKPOINT_PATH="{tmp_path}/run"',
    '--gin.utils.RestoreCheckpointConfig.mode="latest"',
    f'--gin.EVAL_OUTPUT_DIR="{tmp_path}/run/lambada"',
  }


@pytest.mark.parametrize(
  ("arguments", "environment", "text"),
  [
    ((), {}, "expected at least TFDS_DATA_DIR and VOCAB_PATH, got 0 arguments"),
    ((".", "no.model"), {}, "VOCAB_PATH=no.model is not a file"),
    ((".", "spm.model"), {"GPT_SIZE": "6b"}, "GPT_SIZE must be one of: tiny 126m"),
    (
      (".", "spm.model", "logs", "float16"),
      {},
      "PREC must be one of: float32 bfloat16, got 'float16'",
    ),
  ],
)
def test_wrong_arguments_are_errors(run, arguments, environment, text):
  status, _, err = run("run_pile_singlenode.sh", *arguments, **environment)
  assert status == 2
  assert text in err
