"""NVIDIA's scripts: the commands that they run, and the errors in their arguments that they report."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess

import pytest
from forked_python import python

_SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts_gpu"
_T5X_PATH = pathlib.Path(__file__).parents[2] / "t5x/contrib/gpu/scripts_gpu"
_USERS = sorted(path.name for path in _SCRIPTS.glob("*_*_*.s*"))


def test_pretraining_passes_its_positional_arguments_on(run, tmp_path):
  status, out, _ = run(
    "singlenode_pretrain_pile.sh",
    *["base", "float32", "4", "16", "out", "here", "2", "0", "0", "1", "1"],
  )
  assert status == 0
  arguments = out.splitlines()
  assert arguments[:3] == ["-u", "-m", "t5x.train"]
  assert {
    "--gin_file=t5x/contrib/gpu/t5/t5_1_1/examples/base_pile_pretrain.gin",
    f'--gin.MODEL_DIR="{tmp_path}/here"',
    '--gin.network.T5Config.dtype="float32"',
    "--gin.network.T5Config.transpose_batch_sequence=0",
    "--gin.network.T5Config.fuse_qkv_params=1",
    "--gin.trainer.Trainer.num_microbatches=2",
    "--gin.te_helper.TransformerEngineConfig.enabled=0",
    "--gin.train/utils.DatasetConfig.pack=1",
    "--gin.train/utils.DatasetConfig.batch_size=64",
    "--gin.infer_eval/utils.DatasetConfig.batch_size=64",
    "CPUS=4",
  } <= set(arguments)
  log = "base_gpu_4_float32_gbs_64_fp8_0_fuseqkv_1_transbs_0.log"
  assert (tmp_path / "out" / log).read_text() == out


def test_a_resumed_run_appends_to_its_log(run, tmp_path):
  (tmp_path / "model_dir/checkpoint_1").mkdir(parents=True)
  for script in (("singlenode_pretrain_pile.sh",), ("singlenode_ft_frompile.sh", "mnli2")):
    output = "".join(run(*script, "small")[1] for _ in range(2))
    assert output
    assert [log.read_text() for log in (tmp_path / "logs").iterdir()].count(output) == 1


def test_a_process_of_a_gpt_job_takes_paxs_arguments(run, tmp_path):
  (tmp_path / "spm.model").touch()
  arguments = [str(tmp_path), str(tmp_path / "spm.model"), "float32", "8", "2", "logs"]
  job = {"SLURM_NTASKS": "64", "SLURM_PROCID": "9", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7"}
  status, out, _ = run("run_pile_multinode.sh", *arguments, WITH_MP="1", TP_SIZE="2", **job)
  assert status == 0
  assert {
    "--gin_file=gin/examples/gpt_126m_pile_pretrain.gin",
    f'--gin.MODEL_DIR="{tmp_path}/logs"',
    "--gin.BATCH_SIZE=64",
    "--gin.partitioning.PjitPartitioner.num_partitions=2",
    "--multiprocess_gpu",
    "--process_count=64",
    "--process_index=9",
  } <= set(out.splitlines())


def test_a_job_can_have_pipelines_and_split_sequences(run, tmp_path):
  (tmp_path / "spm.model").touch()
  sizes = {"SLURM_NTASKS": "64", "TP_SIZE": "2", "PP_SIZE": "4", "CP_SIZE": "2"}
  files = [str(tmp_path), str(tmp_path / "spm.model")]
  _, out, _ = run("run_pile_multinode.sh", *files, **sizes)
  assert {
    "--gin.BATCH_SIZE=64",
    "--gin.partitioning.PjitPartitioner.num_partitions=1",
    '--gin.partitioning.PjitPartitioner.mesh={"tensor": 2, "context": 2, "pipeline": 4}',
  } <= set(out.splitlines())


def test_processes_of_mpiexec_find_each_other_by_themselves(run):
  job = {"OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_RANK": "3", "BSIZE_PER_GPU": "4"}
  status, out, _ = run("multiprocess_pretrain_pile.sh", WITH_MP="1", **job)
  assert status == 0
  assert "--gin.train/utils.DatasetConfig.batch_size=64" in out
  assert "--multiprocess_gpu" in out
  assert "--process_index" not in out


def test_a_pbs_job_starts_a_process_for_each_slot_of_its_nodes(run, tmp_path):
  (tmp_path / "nodes").write_text("gpu1\ngpu1\ngpu2\ngpu2\n")
  mpiexec = tmp_path / "mpiexec"
  mpiexec.write_text('#!/usr/bin/env bash\necho "$*" "$MODEL_DIR" "$WITH_MP" "$TRAIN_STEPS"\n')
  mpiexec.chmod(0o755)
  job = {"PBS_NODEFILE": str(tmp_path / "nodes"), "MODEL_DIR": "run", "MPIEXEC": str(mpiexec)}
  status, out, _ = run("example_pbs_pretrain_pile.sh", **job)
  assert status == 0
  assert out.split() == [
    *("-n", "4", "bash", str(_SCRIPTS / "multiprocess_pretrain_pile.sh")),
    *("run", "1", "500"),
  ]


def test_by_default_fp8_depends_on_the_gpu_and_requires_bfloat16(run):
  _, out, err = run("singlenode_pretrain_pile.sh", "small", "float32", "1", "8", "out")
  assert "TransformerEngineConfig.enabled" not in out
  assert '--gin.network.T5Config.dtype="bfloat16"' in out
  assert "FP8 requires PREC=bfloat16, which is used now; set ENABLE_FP8=0 to keep float32" in err


def test_without_arguments_the_documented_defaults_run(run, tmp_path):
  status, out, _ = run("singlenode_pretrain_pile.sh")
  assert status == 0
  assert "small_pile_pretrain.gin" in out
  assert f'--gin.MODEL_DIR="{tmp_path}/model_dir"' in out
  assert (tmp_path / "logs").is_dir()


@pytest.mark.parametrize("has_pyxis", [True, False])
def test_a_container_is_passed_to_srun_if_it_supports_containers(run, tmp_path, has_pyxis):
  srun = tmp_path / "srun"
  option = "--container-image=IMAGE" if has_pyxis else "--nodes=N"
  srun.write_text(f'#!/usr/bin/env bash\n[[ $1 != --help ]] || exec echo {option}\necho "$@"\n')
  srun.chmod(0o755)
  job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SCRIPTS_DIR": str(_SCRIPTS)}
  job |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MODEL_DIR": "run"}
  job |= {"CONTAINER": "here.sqsh", "BASE_TFDS_DATA_DIR": "/data"}
  status, out, err = run("example_slurm_pretrain_pile.sub", **job)
  if has_pyxis:
    assert status == 0
    assert "--container-image=here.sqsh --container-mounts=/data:/t5x_home/datasets,/" in out
  else:
    assert status == 2
    assert "CONTAINER is set, but srun has no --container-image on this cluster" in err


def test_only_as_many_of_the_visible_gpus_are_used_as_asked_for(run, tmp_path):
  python = tmp_path / "python"
  python.write_text(python.read_text() + 'echo "GPUS=$CUDA_VISIBLE_DEVICES"\n')
  arguments = ["small", "bfloat16", "2", "8"]
  status, out, _ = run("singlenode_pretrain_pile.sh", *arguments, CUDA_VISIBLE_DEVICES="3,5,7")
  assert status == 0
  assert "GPUS=3,5\n" in out


def test_hidden_gpus_are_not_used(run):
  status, out, err = run("singlenode_pretrain_pile.sh", CUDA_VISIBLE_DEVICES="")
  assert status == 0
  assert "CPUS=1" in out
  assert "no GPU found: using the CPU as 1 device(s)" in err


def test_a_process_of_a_job_is_configured_by_its_environment(run, tmp_path):
  status, out, _ = run(
    "multiprocess_pretrain_pile.sh",
    T5_SIZE="xl",
    BSIZE_PER_GPU="6",
    TP_SIZE="2",
    ENC_SL="256",
    ENABLE_FP8="0",
    SLURM_NTASKS="16",
    SLURM_PROCID="3",
    WITH_MP="1",
    CHECKPOINT_DISABLE="1",
    SLURM_LAUNCH_NODE_IPADDR="10.0.0.7",
    SLURM_JOB_ID="1",
    MODEL_DIR="runs/a",
    T5X_WORKSPACE_DIR=str(tmp_path),
    XLA_FLAGS="--xla_force_host_platform_device_count=1",
  )
  assert status == 0
  assert {
    "--gin_file=t5x/contrib/gpu/t5/t5_1_1/examples/xl_pile_pretrain.gin",
    f'--gin.MODEL_DIR="{tmp_path}/runs/a"',
    '--gin.TASK_FEATURE_LENGTHS={"inputs": 256, "targets": 128}',
    "--gin.TRAIN_STEPS=1000000",
    "--gin.train.stats_period=100",
    "--gin.train/utils.DatasetConfig.batch_size=48",
    "--gin.partitioning.PjitPartitioner.num_partitions=2",
    "--gin.utils.CheckpointConfig.save=None",
    "--multiprocess_gpu",
    "--coordinator_address=10.0.0.7:12361",
    "--process_count=16",
    "--process_index=3",
  } <= set(out.splitlines())
  flags = re.search("XLA_FLAGS=(.*)", out)[1].split()
  assert flags[-1] == "--xla_force_host_platform_device_count=1", "the user's flags come last"
  assert "--xla_gpu_dot_merger_threshold_mb=0" in flags


@pytest.mark.parametrize(
  ("script", "arguments", "environment", "text"),
  [
    (
      "singlenode_pretrain_pile.sh",
      ["smal"],
      {},
      "T5_SIZE must be one of: tiny small base large xl xxl, got 'smal'",
    ),
    (
      "singlenode_pretrain_pile.sh",
      ["small", "float16"],
      {},
      "PREC=float16 is not supported, because T5's activations overflow",
    ),
    (
      "singlenode_pretrain_pile.sh",
      ["small", "bfloat16", "two"],
      {},
      "NUM_GPUS must be an integer of at least 1, got 'two'",
    ),
    ("singlenode_pretrain_pile.sh", ["x"] * 12, {}, "expected at most 11 arguments, got 12"),
    (
      "singlenode_pretrain_pile.sh",
      ["small", "bfloat16", "3"],
      {"CUDA_VISIBLE_DEVICES": "0,1"},
      "NUM_GPUS is 3, but this machine has 2 visible GPU(s)",
    ),
    (
      "singlenode_pretrain_pile.sh",
      ["small", "bfloat16", "08"],
      {},
      "NUM_GPUS must be an integer of at least 1, got '08'\n  See",
    ),
    (
      "singlenode_pretrain_pile.sh",
      ["small", "bfloat16", "1", "9" * 20],
      {},
      f"BSIZE_PER_GPU must be an integer of at least 1, got '{'9' * 20}'",
    ),
    (
      "singlenode_pretrain_pile.sh",
      ["small", "bfloat16", "4096"],
      {"CUDA_VISIBLE_DEVICES": "-1"},
      "NUM_GPUS is 4096, but without a GPU it must be at most 64 devices on the CPU",
    ),
    (
      "singlenode_pretrain_pile.sh",
      ["small", "bfloat16", "1", "8", "/proc/logs"],
      {},
      "LOG_DIR=/proc/logs cannot be created or is not writable",
    ),
    (
      "singlenode_pretrain_pile.sh",
      ["small", "bfloat16", "1", "8", "logs", "python/run"],
      {},
      "python is not a folder that you may write to",
    ),
    (
      "singlenode_pretrain_pile.sh",
      [],
      {"TRAIN_STEPS": "many"},
      "TRAIN_STEPS must be an integer of at least 1, got 'many'",
    ),
    (
      "multiprocess_ft_frompile.sh",
      [],
      {"SLURM_NTASKS": "2", "MAKE_FT_DIR": "true"},
      "MAKE_FT_DIR=true, but this is one of 2 processes",
    ),
    (
      "singlenode_pretrain_pile.sh",
      [],
      {"TFDS_DATA_DIR": "/nowhere"},
      "TFDS_DATA_DIR=/nowhere is not a folder",
    ),
    (
      "singlenode_pretrain_pile.sh",
      [],
      {"PYTHON": "/bin/false"},
      "/bin/false cannot import rosetta_t5",
    ),
    (
      "singlenode_ft_frompile.sh",
      ["mnli"],
      {},
      "FT_TASK must be one of: mnli2 squad1, got 'mnli'",
    ),
    (
      "singlenode_ft_frompile.sh",
      ["mnli2", "small", "bfloat16", "1", "8", "out", "empty", "0", "true"],
      {},
      "/empty does not exist",
    ),
    (
      "multiprocess_pretrain_pile.sh",
      [],
      {"SLURM_NTASKS": "6", "TP_SIZE": "4"},
      "TP_SIZE=4 does not divide the job's 6 processes",
    ),
    (
      "multiprocess_pretrain_pile.sh",
      [],
      {"SLURM_NTASKS": "8", "TP_SIZE": "2", "PP_SIZE": "3"},
      "TP_SIZE=2 × PP_SIZE=3 does not divide the job's 8 processes",
    ),
    ("example_slurm_pretrain_pile.sub", [], {}, "this script must be submitted with sbatch"),
    (
      "example_slurm_pretrain_pile.sub",
      [],
      {"SLURM_JOB_ID": "1", "SCRIPTS_DIR": str(_SCRIPTS)},
      "MODEL_DIR is not set",
    ),
    (
      "example_slurm_pile.sub",
      [],
      {"SLURM_JOB_ID": "1", "SCRIPTS_DIR": str(_SCRIPTS)},
      "BASE_VOCAB_PATH is not set",
    ),
    ("example_pbs_pretrain_pile.sh", [], {}, "this script must be submitted with qsub"),
    ("run_pile_multinode.sh", [], {}, "VOCAB_PATH is missing"),
    (
      "multiprocess_pretrain_pile.sh",
      [],
      {"WITH_MP": "1"},
      "WITH_MP=1, but no launcher has numbered this process",
    ),
    ("../docker/build.sh", [], {}, "NAME, the name of the image, is missing"),
    ("../docker/build.sh", [""], {}, "NAME, the name of the image, is missing"),
    ("../docker/interactive_pull_and_launch.sh", ["", "/tmp"], {}, "CONTAINER is empty"),
    (
      "../docker/interactive_pull_and_launch.sh",
      ["image"],
      {},
      "expected 2 arguments, CONTAINER and DATASET_PATH, got 1",
    ),
  ],
)
def test_wrong_settings_are_errors_before_anything_is_created(
  run, tmp_path, script, arguments, environment, text
):
  before = set(tmp_path.iterdir())
  status, out, err = run(script, *arguments, **environment)
  assert status == 2
  assert f"error: {text}" in err or text in err
  assert out == ""
  assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("script", _USERS)
def test_help_explains_every_argument(run, script):
  status, out, err = run(script, "--help", SCRIPTS_DIR=str(_SCRIPTS))
  assert (status, err) == (0, "")
  assert len(out.splitlines()) > 10


def test_the_scripts_are_also_at_t5x_path(run):
  assert {path.name for path in _T5X_PATH.iterdir()} >= {path.name for path in _SCRIPTS.iterdir()}
  status, out, _ = run("singlenode_pretrain_pile.sh", folder=_T5X_PATH)
  assert status == 0
  assert "small_pile_pretrain.gin" in out


@pytest.mark.parametrize("name", ["download_the_pile", "download_lambada"])
def test_a_missing_dataset_is_an_exit_status_at_both_paths(name, tmp_path):
  environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TFDS_DATA_DIR": str(tmp_path)}
  for command in (["-m", f"t5x.contrib.gpu.scripts_gpu.{name}"], [str(_SCRIPTS / f"{name}.py")]):
    done = subprocess.run(
      [python(), *command],
      cwd=_SCRIPTS.parent,
      env=environment,
      capture_output=True,
      check=False,
    )
    assert (done.returncode, done.stderr) == (1, b"")
    assert done.stdout


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
  folders = (_SCRIPTS, _SCRIPTS.parent / "docker")
  scripts = [str(p) for folder in folders for p in folder.iterdir() if p.suffix in (".sh", ".sub")]
  done = subprocess.run(
    ["shellcheck", "-x", "-P", "SCRIPTDIR", *scripts], capture_output=True, text=True, check=False
  )
  assert done.stdout == ""
