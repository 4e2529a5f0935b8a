#!/usr/bin/env bash
# Runs one of a job's processes, each with one GPU, that pretrain T5 1.1 on the Pile by span corruption. srun starts
# it once for each process (see example_slurm_pretrain_pile.sub). All settings are environment variables.
#
#   T5_SIZE=large           tiny, small, base, large, xl or xxl
#   PREC=bfloat16           or float32
#   BSIZE_PER_GPU=32        sequences; the global batch is BSIZE_PER_GPU * SLURM_NTASKS / TP_SIZE / CP_SIZE
#   ENC_SL=512 DEC_SL=128   tokens of inputs and targets
#   TRAIN_STEPS=1000000
#   NUM_MICROBATCHES=1      microbatches per batch, which saves memory
#   ENABLE_FP8=1            default if the GPU supports FP8, else a warning; an explicit 1 requires it; 0 disables it
#   TP_SIZE=1               GPUs that share each layer
#   CP_SIZE=1               GPUs that share each sequence
#   PP_SIZE=1               pipeline stages, for networks with scanned layers
#   TRANSPOSE_BS=1 FUSE_QKV=1 PACK=0
#   CHECKPOINT_DISABLE=0    1: saves no checkpoints
#   MODEL_DIR=model_dir     under T5X_WORKSPACE_DIR (by default the current folder), or absolute
#   TFDS_DATA_DIR           the folder of the datasets
#   WITH_MP=0               1: the run has several processes
#   WITH_NSYS=0             1: profile with nsys
#   BENCHMARK_MODE          1 or True: 500 steps (STEP_CT) in a new folder, statistics every STAT_PERIOD=100
#   TRAIN_ARGS              further flags for the training command
set -euo pipefail
SCRIPTS_DIR=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
# shellcheck source=training.sh
source "$SCRIPTS_DIR/training.sh"
# shellcheck source=multiprocess.sh
source "$SCRIPTS_DIR/multiprocess.sh"
help_if_asked "$@"

: "${TRAIN_STEPS:=1000000}" "${STAT_PERIOD:=100}"
benchmark=${BENCHMARK_MODE:-}
if [[ $benchmark == 1 || $benchmark == True || $benchmark == true ]]; then
  # A new folder for this job: no earlier run is resumed, and nothing is deleted.
  MODEL_DIR=benchmark_${SLURM_JOB_ID:-$PPID}_${SLURM_STEP_ID:-0}
  TRAIN_STEPS=${STEP_CT:-500}
fi
check_number TRAIN_STEPS "$TRAIN_STEPS" 1
check_number STAT_PERIOD "$STAT_PERIOD" 1
GIN_FILE=${T5_SIZE:-large}_pile_pretrain.gin
prepare_process
COMMAND+=(--gin.TRAIN_STEPS="$TRAIN_STEPS" --gin.train.stats_period="$STAT_PERIOD")
add_train_args
run_process
