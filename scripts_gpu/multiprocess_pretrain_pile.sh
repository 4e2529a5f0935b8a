#!/usr/bin/env bash
# Pretrains T5 1.1 on the Pile by span corruption: one of a job's processes, each with a GPU. It is started
# once for each of them, by srun (see example_slurm_pretrain_pile.sub), and is told everything by its environment.
#
#   T5_SIZE=large           tiny, small, base, large, xl or xxl
#   PREC=bfloat16           or float32
#   BSIZE_PER_GPU=32        sequences; the global batch is BSIZE_PER_GPU * SLURM_NTASKS / TP_SIZE
#   ENC_SL=512 DEC_SL=128   tokens of inputs and targets
#   TRAIN_STEPS=1000000
#   NUM_MICROBATCHES=1      parts a batch is worked through in, to save memory
#   ENABLE_FP8=1            where the GPU has FP8, else a warning; set to 1, it must be there; 0 for none
#   TP_SIZE=1               GPUs that share one copy of the model
#   TRANSPOSE_BS=1 FUSE_QKV=1 PACK=0
#   CHECKPOINT_DISABLE=0    1 saves nothing
#   MODEL_DIR=model_dir     under T5X_WORKSPACE_DIR (by default where you are), or absolute
#   TFDS_DATA_DIR           the folder of the data sets
#   WITH_MP=0               1: this is one of several processes
#   WITH_NSYS=0             1: profile by nsys
#   BENCHMARK_MODE          1 or True: 500 steps (STEP_CT) in a new folder, statistics every STAT_PERIOD=100
#   TRAIN_ARGS              more flags for the training command
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
  # A folder of this job alone: nothing older is continued, and nothing is deleted.
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
