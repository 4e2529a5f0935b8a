#!/usr/bin/env bash
# Runs one of a job's processes, each with one GPU, that pretrain GPT on the Pile; the arguments are Pax's. srun
# starts it once for each process (see example_slurm_pile.sub).
#
# usage: run_pile_multinode.sh [TFDS_DATA_DIR [VOCAB_PATH [PREC [GPUS_PER_NODE [PERCORE_BATCH_SIZE [LOGDIR]]]]]]
#
#   TFDS_DATA_DIR       the folder of the datasets; default the variable of the same name
#   VOCAB_PATH          a SentencePiece model; default the variable GPT_VOCAB_PATH
#   PREC                bfloat16 or float32; default bfloat16
#   GPUS_PER_NODE       ignored, exists for Pax's callers: the job's processes are counted
#   PERCORE_BATCH_SIZE  sequences of 2048 tokens per GPU; default 4
#   LOGDIR              checkpoints and metrics, under T5X_WORKSPACE_DIR (by default the current folder), or absolute;
#                       default the variable MODEL_DIR, else test_logdir
#
# environment: GPT_SIZE (a size in gin/models/gpt; default 126m), TP_SIZE (GPUs that share each layer; default 1),
#   CP_SIZE (GPUs that share each sequence; default 1), PP_SIZE (pipeline stages, for the sizes from 1_7b, whose layers
#   are scanned; default 1), ENABLE_FP8=0, TRANSPOSE_BS=0, FUSE_QKV=1, PACK=1, NUM_MICROBATCHES=0 (as
#   multiprocess_pretrain_pile.sh's), TRAIN_STEPS, PYTHON, XLA_FLAGS (take precedence), TRAIN_ARGS
set -euo pipefail
SCRIPTS_DIR=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
# shellcheck source=training.sh
source "$SCRIPTS_DIR/training.sh"
# shellcheck source=multiprocess.sh
source "$SCRIPTS_DIR/multiprocess.sh"
help_if_asked "$@"

(($# <= 6)) || die "expected at most 6 arguments, got $#" "See $(basename "$0") --help."
TFDS_DATA_DIR=${1:-${TFDS_DATA_DIR:-}}
VOCAB_PATH=${2:-${GPT_VOCAB_PATH:-}}
PREC=${3:-${PREC:-bfloat16}}
PERCORE_BATCH_SIZE=${5:-${PERCORE_BATCH_SIZE:-4}}
LOGDIR=${6:-${MODEL_DIR:-test_logdir}}
: "${T5X_WORKSPACE_DIR:=$PWD}"
tasks=$(count_processes)

[[ -n $VOCAB_PATH ]] || die "VOCAB_PATH is missing" "Give a SentencePiece model; see $(basename "$0") --help."
check_gpt
check_number PERCORE_BATCH_SIZE "$PERCORE_BATCH_SIZE" 1
set_mesh "$tasks"
check_data
check_vocabulary "$VOCAB_PATH"
find_python
(($(count_gpus) > 0)) || export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
set_xla_flags many_nodes

[[ $LOGDIR == /* ]] || LOGDIR=$T5X_WORKSPACE_DIR/$LOGDIR
MODEL_DIR=$LOGDIR
place_model_dir "$PWD"
gpt_command "$LOGDIR" "$((PERCORE_BATCH_SIZE * BATCH_SHARES))"
COMMAND+=("${MESH_FLAGS[@]}")
join_processes
add_train_args
run_process
