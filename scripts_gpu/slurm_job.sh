# shellcheck shell=bash
# The Slurm job of the .sub scripts, on its first node: checks, one srun, and a requeue if the job is interrupted.
# To be sourced, with KIND, SCRIPT and SCRIPTS_DIR set.
set -euo pipefail
# shellcheck source=training.sh
source "$SCRIPTS_DIR/training.sh"
help_if_asked "$@"

GPUS_PER_NODE=${1:-8}
BASE_SCRIPT=${2:-$SCRIPTS_DIR/$SCRIPT}
check_number GPUS_PER_NODE "$GPUS_PER_NODE" 1
[[ -n ${SLURM_JOB_ID:-} ]] || die "this script must be submitted with sbatch" "For example: MODEL_DIR=my_run sbatch -N8 $0"
[[ -n ${MODEL_DIR:-} ]] || die "MODEL_DIR is not set" "Set it to the run's folder, relative to BASE_T5X_WORKSPACE_DIR."
[[ -f $BASE_SCRIPT ]] || die "script $BASE_SCRIPT does not exist" "Give it as the second argument, or set T5X_DIR to the clone."
[[ -z ${BASE_TFDS_DATA_DIR:-} || -z ${DATASET_MAP:-} ]] || die "BASE_TFDS_DATA_DIR and DATASET_MAP are both set" "Set one."

: "${BASE_T5X_WORKSPACE_DIR:=${SLURM_SUBMIT_DIR:-$PWD}}" "${CONTAINER:=}"
: "${BASE_T5X_OUTPUTS_DIR:=$BASE_T5X_WORKSPACE_DIR/outputs}"
[[ -z ${BASE_CHECKPOINTS_DIR:-} || $MODEL_DIR == /* ]] || MODEL_DIR=$BASE_CHECKPOINTS_DIR/$MODEL_DIR
[[ $KIND != FINETUNE ]] || check_choice MAKE_FT_DIR "$MAKE_FT_DIR" true false
make_ft_dir=${MAKE_FT_DIR:-false}
# The job makes the copy once; its processes must not.
export GPUS_PER_NODE MODEL_DIR WITH_MP=1 MAKE_FT_DIR=false

container=()
if [[ -n $CONTAINER ]]; then
  [[ $(srun --help 2>&1) == *--container-image* ]] ||
    die "CONTAINER is set, but srun has no --container-image on this cluster: it requires the plugin pyxis" \
      "Leave CONTAINER empty to run without a container."
  : "${TFDS_DATA_DIR:=/t5x_home/datasets}"
  export TFDS_DATA_DIR T5X_WORKSPACE_DIR=/t5x_home/workspace
  data=${DATASET_MAP:-${BASE_TFDS_DATA_DIR:?set BASE_TFDS_DATA_DIR or DATASET_MAP to the location of the datasets}:$TFDS_DATA_DIR}
  mounts=$data,$BASE_T5X_WORKSPACE_DIR:$T5X_WORKSPACE_DIR,$SCRIPTS_DIR:$SCRIPTS_DIR
  [[ -z ${BASE_CHECKPOINTS_DIR:-} ]] || mounts+=,$BASE_CHECKPOINTS_DIR:$BASE_CHECKPOINTS_DIR
  [[ -z ${MORE_MOUNTS:-} ]] || mounts+=,$MORE_MOUNTS
  container=(--container-image="$CONTAINER" --container-mounts="$mounts")
else
  [[ -z ${DATASET_MAP:-} ]] || die "DATASET_MAP is only for containers, but CONTAINER is empty" "Set BASE_TFDS_DATA_DIR."
  export TFDS_DATA_DIR=${TFDS_DATA_DIR:-${BASE_TFDS_DATA_DIR:-}} T5X_WORKSPACE_DIR=$BASE_T5X_WORKSPACE_DIR
fi

# start_in_copy: changes MODEL_DIR to a new folder with a copy of its last checkpoint. The folder is named after the
# job, so a requeued job resumes there. It is created after one process has checked that all of them can start.
start_in_copy() {
  local new old=$MODEL_DIR tasks=$((SLURM_JOB_NUM_NODES * GPUS_PER_NODE))
  new=$(dirname "$old")/ft_$(basename "$old")_$SLURM_JOB_ID
  # Prints the path outside the container.
  outside() { if [[ $1 == /* ]]; then echo "$1"; else echo "$BASE_T5X_WORKSPACE_DIR/$1"; fi; }
  if [[ ! -d $(outside "$new") ]]; then
    check_checkpoint "$(outside "$old")"
    # A user's own script may ignore CHECK_ONLY and train.
    [[ ! $BASE_SCRIPT -ef $SCRIPTS_DIR/$SCRIPT ]] ||
      srun --nodes=1 --ntasks=1 "${container[@]}" env CHECK_ONLY=1 SLURM_NTASKS="$tasks" bash "$BASE_SCRIPT" ||
      die "the job's processes cannot start (see above): nothing was copied"
    copy_last_checkpoint "$(outside "$old")" "$(outside "$new")"
  fi
  MODEL_DIR=$new
}
[[ $make_ft_dir != true ]] || start_in_copy

folder=$BASE_T5X_OUTPUTS_DIR/multinode/$KIND-${FT_TASK:+$FT_TASK-}${T5_SIZE:-large}-${PREC:-bfloat16}-N$SLURM_JOB_NUM_NODES
mkdir -p "$folder"
echo "output of the processes: $folder/output-$SLURM_JOB_ID-*.txt"

# Slurm signals only this shell, which sends SIGTERM to the processes; they save a checkpoint and end. srun must not
# receive the signal, because it would kill them.
requeue=0
# shellcheck disable=SC2317 # The traps call it.
interrupt() {
  requeue=1
  echo "job $SLURM_JOB_ID is interrupted: its processes save a checkpoint, then it is requeued"
  scancel --signal=TERM "$SLURM_JOB_ID"
}
trap interrupt USR1 TERM

output=$folder/output-%j-%t.txt
srun --ntasks-per-node="$GPUS_PER_NODE" --kill-on-bad-exit=1 "${container[@]}" --open-mode=append -o "$output" -e "$output" bash "$BASE_SCRIPT" &
step=$!
status=0
while kill -0 "$step" 2>/dev/null; do
  status=0
  wait "$step" || status=$?
done
if ((requeue)); then
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
fi
exit "$status"
