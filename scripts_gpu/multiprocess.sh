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

# set_mesh PROCESSES: checks TP_SIZE, PP_SIZE and CP_SIZE; sets MESH_FLAGS, and BATCH_SHARES, the number of parts of a batch.
set_mesh() {
  : "${TP_SIZE:=1}" "${PP_SIZE:=1}" "${CP_SIZE:=1}"
  check_number TP_SIZE "$TP_SIZE" 1
  check_number PP_SIZE "$PP_SIZE" 1
  check_number CP_SIZE "$CP_SIZE" 1
  local copy=$((TP_SIZE * PP_SIZE * CP_SIZE)) names="TP_SIZE=$TP_SIZE" sizes="\"tensor\": $TP_SIZE"
  if ((CP_SIZE > 1)); then names+=" × CP_SIZE=$CP_SIZE" sizes+=", \"context\": $CP_SIZE"; fi
  if ((PP_SIZE > 1)); then names+=" × PP_SIZE=$PP_SIZE" sizes+=", \"pipeline\": $PP_SIZE"; fi
  (($1 % copy == 0)) ||
    die "$names does not divide the job's $1 processes" "$copy processes share one copy of the model."
  BATCH_SHARES=$(($1 / TP_SIZE / CP_SIZE))
  MESH_FLAGS=(--gin.partitioning.PjitPartitioner.num_partitions="$TP_SIZE")
  if ((PP_SIZE * CP_SIZE > 1)); then
    MESH_FLAGS=(--gin.partitioning.PjitPartitioner.num_partitions=1 --gin.partitioning.PjitPartitioner.mesh="{$sizes}")
  fi
}

# prepare_process: sets defaults, checks all variables, and sets BSIZE, MODEL_DIR and COMMAND.
prepare_process() {
  : "${T5_SIZE:=large}" "${PREC:=bfloat16}" "${BSIZE_PER_GPU:=32}" "${ENC_SL:=512}" "${DEC_SL:=128}"
  : "${NUM_MICROBATCHES:=1}" "${ENABLE_FP8:=}" "${TRANSPOSE_BS:=1}" "${FUSE_QKV:=1}"
  : "${PACK:=0}" "${CHECKPOINT_DISABLE:=0}" "${MODEL_DIR:=model_dir}" "${GPUS_PER_NODE:=8}"
  : "${WITH_MP:=0}" "${T5X_WORKSPACE_DIR:=$PWD}"
  local tasks
  tasks=$(count_processes)

  check_model
  check_number BSIZE_PER_GPU "$BSIZE_PER_GPU" 1
  check_number ENC_SL "$ENC_SL" 1
  check_number DEC_SL "$DEC_SL" 1
  check_choice CHECKPOINT_DISABLE "$CHECKPOINT_DISABLE" 0 1
  set_mesh "$tasks"
  check_data
  find_python
  (($(count_gpus) > 0)) || export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
  set_xla_flags many_nodes
  export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

  place_model_dir "$T5X_WORKSPACE_DIR"
  # shellcheck disable=SC2034 # build_command reads it.
  BSIZE=$((BSIZE_PER_GPU * BATCH_SHARES))
  build_command
  COMMAND+=(
    --gin.TASK_FEATURE_LENGTHS="{\"inputs\": $ENC_SL, \"targets\": $DEC_SL}"
    "${MESH_FLAGS[@]}"
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
