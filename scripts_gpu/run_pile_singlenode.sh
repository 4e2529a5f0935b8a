#!/usr/bin/env bash
# Pretrains GPT on the Pile, on the GPUs of this machine, in one process; the arguments are Pax's.
#
# usage: run_pile_singlenode.sh TFDS_DATA_DIR VOCAB_PATH [LOGDIR [PREC [NUM_GPUS [PERCORE_BATCH_SIZE]]]]
#    or: run_pile_singlenode.sh TFDS_DATA_DIR VOCAB_PATH PREC [NUM_GPUS [PERCORE_BATCH_SIZE [LOGDIR]]]
#
#   TFDS_DATA_DIR       the folder of the datasets: the_pile as prepared by TFDS, or its original files
#   VOCAB_PATH          a SentencePiece model; Pax: c4_en_301_5Mexp2_spm.model
#   LOGDIR              checkpoints, metrics and the log; default test_logdir
#   PREC                bfloat16 or float32; default bfloat16
#   NUM_GPUS            default all; without a GPU, the number of devices on the CPU (default 1)
#   PERCORE_BATCH_SIZE  sequences of 2048 tokens per GPU; default 4
#
# environment: GPT_SIZE (tiny, 126m, 5b, 175b, 1_7b, ... in gin/models/gpt; default 126m), ENABLE_FP8=0,
#   TRANSPOSE_BS=0, FUSE_QKV=1, PACK=1, NUM_MICROBATCHES=0 (as singlenode_pretrain_pile.sh's arguments of these
#   names), TRAIN_STEPS, PYTHON, XLA_FLAGS (take precedence), TRAIN_ARGS (further flags for the training command, e.g.
#   "--gin.train.stats_period=10")
#
# The same command resumes an interrupted run.
set -euo pipefail
SCRIPTS_DIR=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
# shellcheck source=training.sh
source "$SCRIPTS_DIR/training.sh"
help_if_asked "$@"

(($# >= 2)) || die "expected at least TFDS_DATA_DIR and VOCAB_PATH, got $# arguments" "See $(basename "$0") --help."
(($# <= 6)) || die "expected at most 6 arguments, got $#" "See $(basename "$0") --help."
TFDS_DATA_DIR=$1
VOCAB_PATH=$2
case ${3:-} in
  bfloat16 | float32) set -- "$1" "$2" "${6:-test_logdir}" "$3" "${4:-}" "${5:-}" ;;
esac
LOGDIR=${3:-test_logdir}
PREC=${4:-bfloat16}
NUM_GPUS=${5:-$(count_gpus)}
PERCORE_BATCH_SIZE=${6:-4}

[[ $NUM_GPUS != 0 || -n ${5:-} ]] || NUM_GPUS=1
check_gpt
check_number NUM_GPUS "$NUM_GPUS" 1
check_number PERCORE_BATCH_SIZE "$PERCORE_BATCH_SIZE" 1
check_data
check_vocabulary "$VOCAB_PATH"
find_python
use_gpus "$NUM_GPUS"
set_xla_flags one_node

[[ $LOGDIR == /* ]] || LOGDIR=$PWD/$LOGDIR
gpt_command "$LOGDIR" "$((NUM_GPUS * PERCORE_BATCH_SIZE))"
add_train_args

mkdir -p "$LOGDIR"
log=$LOGDIR/pile_output.log
note "GPT $GPT_SIZE, batch $((NUM_GPUS * PERCORE_BATCH_SIZE)), log $log"
"${COMMAND[@]}" 2>&1 | tee -a "$log"
