#!/usr/bin/env bash
# Runs one of a job's processes, each with one GPU, that finetune a T5 1.1 pretrained on the Pile. srun starts it
# once for each process (see example_slurm_ft_frompile.sub). All settings are environment variables.
#
#   FT_TASK=mnli2           or squad1
#   T5_SIZE=large           tiny, small, base, large, xl or xxl, as pretrained
#   PREC=bfloat16           or float32
#   BSIZE_PER_GPU=32        sequences; the global batch is BSIZE_PER_GPU * SLURM_NTASKS / TP_SIZE / CP_SIZE
#   ENC_SL=512 DEC_SL=128   tokens of inputs and targets
#   NUM_MICROBATCHES=1      microbatches per batch, which saves memory
#   ENABLE_FP8=1            default if the GPU supports FP8, else a warning; an explicit 1 requires it; 0 disables it
#   TP_SIZE=1               GPUs that share each layer
#   CP_SIZE=1               GPUs that share each sequence
#   PP_SIZE=1               pipeline stages, for networks with scanned layers
#   TRANSPOSE_BS=1 FUSE_QKV=1 PACK=0
#   CHECKPOINT_DISABLE=0    1: saves no checkpoints
#   MODEL_DIR=model_dir     the folder of the pretrained checkpoints, absolute or relative to T5X_WORKSPACE_DIR (by
#                           default the current folder). Finetuning continues there and keeps the pretrained one
#   MAKE_FT_DIR=false       true copies the last checkpoint to a new folder ft_MODEL_DIR_DATE and finetunes there. It
#                           requires a single process; for a job, set it for example_slurm_ft_frompile.sub
#   TFDS_DATA_DIR           the folder of the datasets
#   WITH_MP=0               1: the run has several processes
#   WITH_NSYS=0             1: profile with nsys
#   STAT_PERIOD=1000        steps between statistics and evaluations
#   TRAIN_STEPS             the last step, counted from the start of pretraining; default the recipe's
#   TRAIN_ARGS              further flags for the training command
#   CHECK_ONLY=0            1: only checks whether the finetuning can start
set -euo pipefail
SCRIPTS_DIR=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
# shellcheck source=training.sh
source "$SCRIPTS_DIR/training.sh"
# shellcheck source=multiprocess.sh
source "$SCRIPTS_DIR/multiprocess.sh"
help_if_asked "$@"

: "${FT_TASK:=mnli2}" "${STAT_PERIOD:=1000}" "${MAKE_FT_DIR:=false}"
check_choice FT_TASK "$FT_TASK" mnli2 squad1
check_choice MAKE_FT_DIR "$MAKE_FT_DIR" true false
# Each process would create a folder of its own.
[[ $MAKE_FT_DIR == false || $(count_processes) == 1 ]] ||
  die "MAKE_FT_DIR=true, but this is one of $(count_processes) processes" "Give it to example_slurm_ft_frompile.sub, which copies once, or copy the checkpoint yourself."
check_number STAT_PERIOD "$STAT_PERIOD" 1
GIN_FILE=${T5_SIZE:-large}_${FT_TASK}_finetune_adam.gin
prepare_process
COMMAND+=(--gin.train.stats_period="$STAT_PERIOD" --gin.train.eval_period="$STAT_PERIOD")
[[ -z ${TRAIN_STEPS:-} ]] || COMMAND+=(--gin.TRAIN_STEPS="$TRAIN_STEPS")
add_train_args
if [[ ${CHECK_ONLY:-0} == 1 ]]; then
  check_start "$(count_processes)"
  exit 0
fi
choose_finetuning_folder "$(count_processes)"
run_process
