#!/usr/bin/env bash
# Finetunes a T5 1.1 that was pretrained on the Pile: one of a job's processes, each with a GPU. It is started
# once for each of them, by srun (see example_slurm_ft_frompile.sub), and is told everything by its environment.
#
#   FT_TASK=mnli2           or squad1
#   T5_SIZE=large           tiny, small, base, large, xl or xxl, as pretrained
#   PREC=bfloat16           or float32
#   BSIZE_PER_GPU=32        sequences; the global batch is BSIZE_PER_GPU * SLURM_NTASKS / TP_SIZE
#   ENC_SL=512 DEC_SL=128   tokens of inputs and targets
#   NUM_MICROBATCHES=1      parts a batch is worked through in, to save memory
#   ENABLE_FP8=1            where the GPU has FP8, else a warning; set to 1, it must be there; 0 for none
#   TP_SIZE=1               GPUs that share one copy of the model
#   TRANSPOSE_BS=1 FUSE_QKV=1 PACK=0
#   CHECKPOINT_DISABLE=0    1 saves nothing
#   MODEL_DIR=model_dir     where the pretrained checkpoints lie: under T5X_WORKSPACE_DIR (by default where
#                           you are), or absolute. Finetuning goes on there, and keeps what it started from
#   MAKE_FT_DIR=false       true copies the last checkpoint to a new folder ft_MODEL_DIR_DATE and finetunes there: for
#                           one process; for a job's, example_slurm_ft_frompile.sub does it
#   TFDS_DATA_DIR           the folder of the data sets
#   WITH_MP=0               1: this is one of several processes
#   WITH_NSYS=0             1: profile by nsys
#   STAT_PERIOD=1000        steps between statistics and evaluations
#   TRAIN_STEPS             where to end, those of the pretraining included; default the recipe's
#   TRAIN_ARGS              more flags for the training command
#   CHECK_ONLY=0            1: says whether this could begin, and ends
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
# Each of several processes would make a folder of its own.
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
