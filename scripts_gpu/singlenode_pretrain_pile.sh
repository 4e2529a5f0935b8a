#!/usr/bin/env bash
# Pretrains T5 1.1 on the Pile by span corruption, on the GPUs of this machine, in one process.
#
# usage: singlenode_pretrain_pile.sh [T5_SIZE [PREC [NUM_GPUS [BSIZE_PER_GPU [LOG_DIR [MODEL_DIR
#          [NUM_MICROBATCHES [ENABLE_FP8 [TRANSPOSE_BS [FUSE_QKV [PACK]]]]]]]]]]]
#
#   T5_SIZE           tiny, small, base, large, xl or xxl; default small
#   PREC              bfloat16 or float32; default bfloat16
#   NUM_GPUS          default all; without a GPU, the number of devices on the CPU (default 1)
#   BSIZE_PER_GPU     sequences; default 256
#   LOG_DIR           the folder of the log, which is appended to and also printed; default logs
#   MODEL_DIR         absolute or relative to the current folder; default model_dir
#   NUM_MICROBATCHES  microbatches per batch, which saves memory; default 0, the whole batch at once
#   ENABLE_FP8        1 or 0; default 1 if the GPU supports FP8, else a warning; an explicit 1 requires it
#   TRANSPOSE_BS      1 or 0: sequence before batch in memory; default 1
#   FUSE_QKV          1 or 0: one matmul for queries, keys and values; default 1
#   PACK              1 or 0: several texts per sequence; default 0
#
# environment: TFDS_DATA_DIR (the folder of the datasets), TRAIN_STEPS, PYTHON, XLA_FLAGS (take precedence),
#   TRAIN_ARGS (further flags for the training command, e.g. "--gin.train.stats_period=10")
#
# The same command resumes an interrupted run.
set -euo pipefail
SCRIPTS_DIR=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
# shellcheck source=training.sh
source "$SCRIPTS_DIR/training.sh"
help_if_asked "$@"

T5_SIZE=${1:-small}
PREC=${2:-bfloat16}
NUM_GPUS=${3:-$(count_gpus)}
BSIZE_PER_GPU=${4:-256}
LOG_DIR=${5:-logs}
MODEL_DIR=${6:-model_dir}
NUM_MICROBATCHES=${7:-0}
ENABLE_FP8=${8:-}
TRANSPOSE_BS=${9:-1}
FUSE_QKV=${10:-1}
PACK=${11:-0}
(($# <= 11)) || die "expected at most 11 arguments, got $#" "See $(basename "$0") --help."

[[ $NUM_GPUS != 0 || -n ${3:-} ]] || NUM_GPUS=1
check_number NUM_GPUS "$NUM_GPUS" 1
check_number BSIZE_PER_GPU "$BSIZE_PER_GPU" 1
[[ -z ${TRAIN_STEPS:-} ]] || check_number TRAIN_STEPS "$TRAIN_STEPS" 1
check_model
check_data
find_python
use_gpus "$NUM_GPUS"
set_xla_flags one_node
place_model_dir "$PWD"
make_log_dir "$LOG_DIR"

BSIZE=$((NUM_GPUS * BSIZE_PER_GPU))
GIN_FILE=${T5_SIZE}_pile_pretrain.gin
build_command
[[ -z ${TRAIN_STEPS:-} ]] || COMMAND+=(--gin.TRAIN_STEPS="$TRAIN_STEPS")
add_train_args

log=$LOG_DIR/${T5_SIZE}_gpu_${NUM_GPUS}_${PREC}_gbs_${BSIZE}_fp8_${ENABLE_FP8:-1}_fuseqkv_${FUSE_QKV}_transbs_${TRANSPOSE_BS}.log
note "batch $BSIZE, log $log"
"${COMMAND[@]}" 2>&1 | tee -a "$log"
