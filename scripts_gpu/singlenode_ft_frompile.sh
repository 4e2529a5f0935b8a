#!/usr/bin/env bash
# Finetunes a T5 1.1 that was pretrained on the Pile, on the GPUs of this machine, in one process.
#
# usage: singlenode_ft_frompile.sh FT_TASK [T5_SIZE [PREC [NUM_GPUS [BSIZE_PER_GPU [LOG_DIR [MODEL_DIR
#          [NUM_MICROBATCHES [MAKE_FT_DIR [ENABLE_FP8 [TRANSPOSE_BS [FUSE_QKV [PACK]]]]]]]]]]]]
#
#   FT_TASK           mnli2 or squad1; default mnli2
#   T5_SIZE           tiny, small, base, large, xl or xxl, as pretrained; default small
#   PREC              bfloat16 or float32; default bfloat16
#   NUM_GPUS          default all; without a GPU, the number of devices on the CPU (default 1)
#   BSIZE_PER_GPU     sequences; default 16
#   LOG_DIR           the folder of the log, which is appended to and also printed; default logs
#   MODEL_DIR         the folder of the pretrained checkpoints, absolute or relative to the current folder;
#                     default model_dir. Finetuning continues there, and keeps the pretrained checkpoint
#   NUM_MICROBATCHES  microbatches per batch, which saves memory; default 0, the whole batch at once
#   MAKE_FT_DIR       true or false; true copies the last checkpoint to a new folder ft_MODEL_DIR_DATE and
#                     finetunes there; default false
#   ENABLE_FP8        1 or 0; default 1 if the GPU supports FP8, else a warning; an explicit 1 requires it
#   TRANSPOSE_BS      1 or 0: sequence before batch in memory; default 1
#   FUSE_QKV          1 or 0: one matmul for queries, keys and values; default 1
#   PACK              1 or 0: several texts per sequence; default 0
#
# environment: TFDS_DATA_DIR (the folder of the datasets), TRAIN_STEPS, PYTHON, XLA_FLAGS (take precedence),
#   TRAIN_ARGS (further flags for the training command)
set -euo pipefail
SCRIPTS_DIR=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
# shellcheck source=training.sh
source "$SCRIPTS_DIR/training.sh"
help_if_asked "$@"

FT_TASK=${1:-mnli2}
T5_SIZE=${2:-small}
PREC=${3:-bfloat16}
NUM_GPUS=${4:-$(count_gpus)}
BSIZE_PER_GPU=${5:-16}
LOG_DIR=${6:-logs}
MODEL_DIR=${7:-model_dir}
NUM_MICROBATCHES=${8:-0}
MAKE_FT_DIR=${9:-false}
ENABLE_FP8=${10:-}
TRANSPOSE_BS=${11:-1}
FUSE_QKV=${12:-1}
PACK=${13:-0}
(($# <= 13)) || die "expected at most 13 arguments, got $#" "See $(basename "$0") --help."

[[ $NUM_GPUS != 0 || -n ${4:-} ]] || NUM_GPUS=1
check_choice FT_TASK "$FT_TASK" mnli2 squad1
check_number NUM_GPUS "$NUM_GPUS" 1
check_number BSIZE_PER_GPU "$BSIZE_PER_GPU" 1
check_choice MAKE_FT_DIR "$MAKE_FT_DIR" true false
[[ -z ${TRAIN_STEPS:-} ]] || check_number TRAIN_STEPS "$TRAIN_STEPS" 1
check_model
check_data
find_python
use_gpus "$NUM_GPUS"
set_xla_flags one_node
place_model_dir "$PWD"
[[ $MAKE_FT_DIR == false ]] || check_checkpoint "$MODEL_DIR"
make_log_dir "$LOG_DIR"

BSIZE=$((NUM_GPUS * BSIZE_PER_GPU))
GIN_FILE=${T5_SIZE}_${FT_TASK}_finetune_adam.gin
build_command
[[ -z ${TRAIN_STEPS:-} ]] || COMMAND+=(--gin.TRAIN_STEPS="$TRAIN_STEPS")
add_train_args
choose_finetuning_folder "$NUM_GPUS"

log=$LOG_DIR/ft_${T5_SIZE}_gpu_${NUM_GPUS}_${PREC}_gbs_${BSIZE}_fp8_${ENABLE_FP8:-1}_fuseqkv_${FUSE_QKV}_transbs_${TRANSPOSE_BS}.log
note "batch $BSIZE, log $log"
"${COMMAND[@]}" 2>&1 | tee -a "$log"
