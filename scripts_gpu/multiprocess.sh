# shellcheck shell=bash
# Functions for the multiprocess scripts: the identity of this process in the job. To be sourced.

# Prints the address of process 0: the job's first node, with a port that no other job uses there.
coordinator_address() {
  local host
  if [[ -n ${SLURM_JOB_NODELIST:-} ]]; then
    host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
  else
    host=${SLURM_LAUNCH_NODE_IPADDR:?neither SLURM_JOB_NODELIST nor SLURM_LAUNCH_NODE_IPADDR is set}
  fi
  echo "$host:${COORDINATOR_PORT:-$((12345 + (${SLURM_JOB_ID:-0} * 16 + ${SLURM_STEP_ID:-0} % 16) % 20000))}"
}

# Prints the number of the job's processes, from the variables of Slurm, Open MPI, or PBS's and other mpiexecs.
count_processes() {
  echo "${SLURM_NTASKS:-${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-${PALS_SIZE:-1}}}}"
}

# Adds the multiprocess flags to COMMAND. Under mpiexec the training finds the other processes itself.
join_processes() {
  [[ ${WITH_MP:-0} == 1 ]] || return 0
  COMMAND+=(--multiprocess_gpu)
  if [[ -n ${SLURM_PROCID:-} ]]; then
    COMMAND+=(--coordinator_address="$(coordinator_address)" --process_count="$(count_processes)" --process_index="$SLURM_PROCID")
  elif [[ -z ${OMPI_COMM_WORLD_RANK:-}${PMI_RANK:-}${PALS_RANKID:-} ]]; then
    die "WITH_MP=1, but no launcher has numbered this process" "Start it with srun or mpiexec."
  fi
}

# prepare_process: sets defaults, checks all variables, and sets BSIZE, MODEL_DIR and COMMAND.
prepare_process() {
  : "${T5_SIZE:=large}" "${PREC:=bfloat16}" "${BSIZE_PER_GPU:=32}" "${ENC_SL:=512}" "${DEC_SL:=128}"
  : "${NUM_MICROBATCHES:=1}" "${ENABLE_FP8:=}" "${TP_SIZE:=1}" "${TRANSPOSE_BS:=1}" "${FUSE_QKV:=1}"
  : "${PACK:=0}" "${CHECKPOINT_DISABLE:=0}" "${MODEL_DIR:=model_dir}" "${GPUS_PER_NODE:=8}"
  : "${WITH_MP:=0}" "${T5X_WORKSPACE_DIR:=$PWD}"
  local tasks
  tasks=$(count_processes)

  check_model
  check_number BSIZE_PER_GPU "$BSIZE_PER_GPU" 1
  check_number TP_SIZE "$TP_SIZE" 1
  check_number ENC_SL "$ENC_SL" 1
  check_number DEC_SL "$DEC_SL" 1
  check_choice CHECKPOINT_DISABLE "$CHECKPOINT_DISABLE" 0 1
  ((tasks % TP_SIZE == 0)) ||
    die "TP_SIZE=$TP_SIZE does not divide the job's $tasks processes" "TP_SIZE processes share one copy of the model."
  check_data
  find_python
  (($(count_gpus) > 0)) || export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
  set_xla_flags many_nodes
  export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

  place_model_dir "$T5X_WORKSPACE_DIR"
  # shellcheck disable=SC2034 # build_command reads it.
  BSIZE=$((BSIZE_PER_GPU * tasks / TP_SIZE))
  build_command
  COMMAND+=(
    --gin.TASK_FEATURE_LENGTHS="{\"inputs\": $ENC_SL, \"targets\": $DEC_SL}"
    --gin.partitioning.PjitPartitioner.num_partitions="$TP_SIZE"
    --gin.train.gc_period=2000)
  [[ $CHECKPOINT_DISABLE == 0 ]] || COMMAND+=(--gin.utils.CheckpointConfig.save=None)
  join_processes
}

# run_process: replaces this shell by the training, so that Slurm's signals reach it.
run_process() {
  local profile=()
  [[ ${WITH_NSYS:-0} != 1 ]] ||
    profile=(nsys profile -t "nvtx,cuda,cublas" -o "$MODEL_DIR/profile_${SLURM_PROCID:-0}" -f true -c cudaProfilerApi)
  exec "${profile[@]}" "${COMMAND[@]}"
}
