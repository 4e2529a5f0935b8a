# shellcheck shell=bash
# Functions for the scripts in this folder: checks, and the training command that they run. To be sourced.

die() {
  printf 'error: %s\n' "$1" >&2
  shift
  (($# == 0)) || printf '  %s\n' "$@" >&2
  exit 2
}

note() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }

# Prints the comment at the start of the script if the arguments contain -h or --help.
help_if_asked() {
  local argument
  for argument; do
    [[ $argument == -h || $argument == --help ]] || continue
    awk 'NR > 1 { if (!/^#/ || /^#SBATCH/) exit; sub(/^# ?/, ""); print }' "$0"
    exit 0
  done
}

# check_choice NAME VALUE CHOICE...
check_choice() {
  local name=$1 value=$2 choice
  shift 2
  for choice; do [[ $value != "$choice" ]] || return 0; done
  die "$name must be one of: $*, got '$value'" "See $(basename "$0") --help."
}

# check_number NAME VALUE MINIMUM
check_number() {
  # Bash reads a leading zero as octal, and more digits than these overflow.
  [[ $2 =~ ^(0|[1-9][0-9]{0,8})$ ]] && (($2 >= $3)) && return
  die "$1 must be an integer of at least $3, got '$2'" "See $(basename "$0") --help."
}

# Sets PYTHON to an interpreter with the package: the given one, the clone's own, or the one on PATH.
find_python() {
  local of_clone=${SCRIPTS_DIR}/../.venv/bin/python
  if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ ! -x $of_clone ]] || PYTHON=$of_clone
  fi
  # Import rosetta_t5, because a package t5x may be a different one.
  "$PYTHON" -c 'import rosetta_t5' 2>/dev/null ||
    die "$PYTHON cannot import rosetta_t5" "Install it ('make setup' in the clone, or 'pip install .'), or set PYTHON."
}

count_gpus() {
  case ${CUDA_VISIBLE_DEVICES-all} in
    all)
      if command -v nvidia-smi >/dev/null; then nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true; else echo 0; fi
      ;;
    # These values hide all GPUs: an empty one, a number that no GPU has, and Slurm's.
    '' | -1* | NoDevFiles) echo 0 ;;
    *) awk -F, '{ print NF }' <<<"$CUDA_VISIBLE_DEVICES" ;;
  esac
}

# use_gpus COUNT: makes exactly COUNT GPUs visible; without a GPU, makes COUNT devices of the CPU.
use_gpus() {
  local visible
  visible=$(count_gpus)
  if ((visible == 0)); then
    (($1 <= 64)) || die "NUM_GPUS is $1, but without a GPU it must be at most 64 devices on the CPU"
    note "no GPU found: using the CPU as $1 device(s)"
    export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu} JAX_NUM_CPU_DEVICES=${JAX_NUM_CPU_DEVICES:-$1}
    return
  fi
  (($1 <= visible)) ||
    die "NUM_GPUS is $1, but this machine has $visible visible GPU(s)" "Give at most $visible, or change CUDA_VISIBLE_DEVICES."
  CUDA_VISIBLE_DEVICES=$(cut -d, -f"1-$1" <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((visible - 1)))}")
  export CUDA_VISIBLE_DEVICES
}

check_model() {
  check_choice T5_SIZE "$T5_SIZE" tiny small base large xl xxl
  [[ $PREC != float16 ]] ||
    die "PREC=float16 is not supported, because T5's activations overflow in it" "Use bfloat16, which has the range of float32, or float32."
  check_choice PREC "$PREC" float32 bfloat16
  check_number NUM_MICROBATCHES "$NUM_MICROBATCHES" 0
  check_choice TRANSPOSE_BS "$TRANSPOSE_BS" 0 1
  check_choice FUSE_QKV "$FUSE_QKV" 0 1
  check_choice PACK "$PACK" 0 1
  [[ -z $ENABLE_FP8 ]] || check_choice ENABLE_FP8 "$ENABLE_FP8" 0 1
  # FP8 matmuls have bfloat16 operands. By default FP8 is on if the GPU supports it.
  if [[ ${ENABLE_FP8:-1} == 1 && $PREC != bfloat16 ]]; then
    note "FP8 requires PREC=bfloat16, which is used now; set ENABLE_FP8=0 to keep $PREC"
    PREC=bfloat16
  fi
}

# check_gpt_size: checks GPT_SIZE, which must be the name of a file in gin/models/gpt.
check_gpt_size() {
  check_choice GPT_SIZE "$GPT_SIZE" tiny 126m 1_7b 3_6b 5b 7_5b 18_4b 39_1b 76_1b 145_6b 175b 310_1b
}

check_data() {
  : "${TFDS_DATA_DIR:=}"
  [[ -n $TFDS_DATA_DIR || ! -d /t5x_home/datasets ]] || TFDS_DATA_DIR=/t5x_home/datasets
  [[ -z $TFDS_DATA_DIR || -d $TFDS_DATA_DIR ]] ||
    die "TFDS_DATA_DIR=$TFDS_DATA_DIR is not a folder" "It must contain one folder for each dataset (docs/data.md)."
}

# check_vocabulary PATH
check_vocabulary() {
  [[ -f $1 ]] || die "VOCAB_PATH=$1 is not a file" "It must be a SentencePiece model, such as c4_en_301_5Mexp2_spm.model."
}

# place_model_dir FOLDER: puts a relative MODEL_DIR under FOLDER, and checks that it is writable. A MODEL_DIR in an
# object store, such as gs://, is left unchanged.
place_model_dir() {
  [[ $MODEL_DIR != *://* ]] || return 0
  [[ $MODEL_DIR == /* ]] || MODEL_DIR=$1/$MODEL_DIR
  local existing=$MODEL_DIR
  while [[ ! -e $existing ]]; do existing=$(dirname "$existing"); done
  [[ -d $existing && -w $existing ]] ||
    die "MODEL_DIR=$MODEL_DIR is not writable: $existing is not a folder that you may write to" "Give another MODEL_DIR."
}

# make_log_dir FOLDER
make_log_dir() {
  { mkdir -p "$1" && [[ -w $1 ]]; } 2>/dev/null ||
    die "LOG_DIR=$1 cannot be created or is not writable" "Give a folder that you may write to."
}

# last_checkpoint FOLDER: prints the name of its last complete checkpoint, or nothing if there is none.
last_checkpoint() {
  [[ -d $1 ]] || return 0
  find "$1" -maxdepth 1 -name 'checkpoint_*' -printf '%f\n' |
    { grep -E '^checkpoint_[0-9]+$' || true; } | sort -t_ -k2 -n | tail -1
}

# check_checkpoint FOLDER: checks that MAKE_FT_DIR can copy a checkpoint from FOLDER.
check_checkpoint() {
  [[ -d $1 ]] || die "MAKE_FT_DIR=true, but folder $1 does not exist"
  [[ -n $(last_checkpoint "$1") ]] || die "MAKE_FT_DIR=true, but $1 has no checkpoint to copy"
}

# copy_last_checkpoint FROM TO: makes a complete copy or none; an existing copy is kept.
copy_last_checkpoint() {
  [[ ! -d $2 ]] || return 0
  check_checkpoint "$1"
  local last
  last=$(last_checkpoint "$1")
  mkdir -p "$2.part" # an interrupted copy may have left one
  cp -r "$1/$last" "$2.part/"
  mv "$2.part" "$2"
  note "copied $1/$last to $2, where finetuning starts"
}

# check_start DEVICES: checks that COMMAND can start on DEVICES devices: its gin files, checkpoint, and FT_TASK's data.
check_start() {
  local task=glue_mnli_v2
  [[ $FT_TASK == mnli2 ]] || task=squad_v010_allanswers
  note "checking the configuration, the checkpoint and $task before anything is copied"
  "${COMMAND[@]}" --devices="$1" --dry_run >/dev/null || die "the finetuning cannot start (see above): nothing was copied"
  # The data of any other task is not checked.
  [[ ${COMMAND[*]} == *MIXTURE_OR_TASK* ]] || "$PYTHON" -u -m rosetta_t5.cli inspect "$task" --batches=1 --examples=0 \
    --module=t5x.contrib.gpu.scripts_gpu.seqio_tasks ${TFDS_DATA_DIR:+--tfds_data_dir="$TFDS_DATA_DIR"} >/dev/null ||
    (($? == 1)) || die "the data of $task cannot be read (see above): nothing was copied"
}

# choose_finetuning_folder DEVICES: with MAKE_FT_DIR=true, changes COMMAND's MODEL_DIR to a new folder with a copy of
# its last checkpoint, after everything else has been checked.
choose_finetuning_folder() {
  if [[ $MAKE_FT_DIR == true ]]; then
    local folder
    folder=$(dirname "$MODEL_DIR")/ft_$(basename "$MODEL_DIR")_$(date +%F_%H-%M-%S)
    check_checkpoint "$MODEL_DIR"
    check_start "$1"
    copy_last_checkpoint "$MODEL_DIR" "$folder"
    MODEL_DIR=$folder
    COMMAND=("${COMMAND[@]/#--gin.MODEL_DIR=*/--gin.MODEL_DIR=\"$MODEL_DIR\"}")
  elif [[ $MODEL_DIR != *://* && ${COMMAND[*]} != *INITIAL_CHECKPOINT_PATH* && ${COMMAND[*]} != *RestoreCheckpointConfig* &&
    -z $(last_checkpoint "$MODEL_DIR") ]]; then
    die "MODEL_DIR=$MODEL_DIR has no checkpoint to finetune" \
      "Pretrain there first, or give one: TRAIN_ARGS=--gin.INITIAL_CHECKPOINT_PATH=\"'/runs/large'\", a folder of checkpoint_STEP folders."
  fi
}

# Sets COMMAND from GIN_FILE, BSIZE and the variables of the scripts.
build_command() {
  local batch
  COMMAND=("$PYTHON" -u -m t5x.train
    --gin_file="t5x/contrib/gpu/t5/t5_1_1/examples/${GIN_FILE}"
    --gin.MODEL_DIR="\"$MODEL_DIR\""
    --gin.network.T5Config.dtype="\"$PREC\""
    --gin.network.T5Config.transpose_batch_sequence="$TRANSPOSE_BS"
    --gin.network.T5Config.fuse_qkv_params="$FUSE_QKV"
    --gin.trainer.Trainer.num_microbatches="$NUM_MICROBATCHES"
    --gin.train.te_config_cls=@te_helper.TransformerEngineConfig
    --gin.te_helper.TransformerEngineConfig.fp8_format='"hybrid"'
    --gin.train/utils.DatasetConfig.pack="$PACK"
    --gin.train_eval/utils.DatasetConfig.pack="$PACK")
  for batch in train train_eval infer_eval; do
    COMMAND+=(--gin."$batch"/utils.DatasetConfig.batch_size="$BSIZE")
  done
  # By default it depends on the GPUs; an explicit value fails if the GPUs do not support it.
  [[ -z $ENABLE_FP8 ]] || COMMAND+=(--gin.te_helper.TransformerEngineConfig.enabled="$ENABLE_FP8")
  [[ -z ${TFDS_DATA_DIR:-} ]] || COMMAND+=(--tfds_data_dir="$TFDS_DATA_DIR")
}

# The user's own flags come last and take precedence.
add_train_args() {
  local more
  read -r -a more <<<"${TRAIN_ARGS:-}"
  COMMAND+=("${more[@]}")
}

# The flags for this machine and size, then the user's own, which take precedence.
set_xla_flags() {
  XLA_FLAGS=$("$PYTHON" -m rosetta_t5.parallel.process_settings "${SCRIPTS_DIR}/xla_flags/$1.txt")
  export XLA_FLAGS
}

# Sets the defaults of a GPT script's variables, and checks them.
check_gpt() {
  : "${GPT_SIZE:=126m}" "${ENABLE_FP8:=0}" "${TRANSPOSE_BS:=0}" "${FUSE_QKV:=1}" "${PACK:=1}" "${NUM_MICROBATCHES:=0}"
  check_choice PREC "$PREC" float32 bfloat16
  check_gpt_size
  local switch
  for switch in ENABLE_FP8 TRANSPOSE_BS FUSE_QKV PACK; do check_choice "$switch" "${!switch}" 0 1; done
  check_number NUM_MICROBATCHES "$NUM_MICROBATCHES" 0
  [[ -z ${TRAIN_STEPS:-} ]] || check_number TRAIN_STEPS "$TRAIN_STEPS" 1
}

# gpt_command LOGDIR BATCH: sets COMMAND to pretrain GPT on the Pile with GPT_SIZE, PREC, the switches, VOCAB_PATH,
# TFDS_DATA_DIR and TRAIN_STEPS.
gpt_command() {
  COMMAND=("$PYTHON" -u -m t5x.train
    --gin_file=gin/examples/gpt_126m_pile_pretrain.gin
    --gin_file="gin/models/gpt/$GPT_SIZE.gin"
    --gin.DROPOUT_RATE=0.0
    --gin.MODEL_DIR="\"$1\""
    --gin.BATCH_SIZE="$2"
    --gin.network.TransformerConfig.dtype="\"$PREC\""
    --gin.network.TransformerConfig.transpose_batch_sequence="$TRANSPOSE_BS"
    --gin.network.TransformerConfig.fuse_qkv_params="$FUSE_QKV"
    --gin.trainer.Trainer.num_microbatches="$NUM_MICROBATCHES"
    --gin.train/utils.DatasetConfig.pack="$PACK"
    --gin.train_eval/utils.DatasetConfig.pack="$PACK"
    --gin.seqio.SentencePieceVocabulary.sentencepiece_model_file="\"$VOCAB_PATH\"")
  [[ -z $TFDS_DATA_DIR ]] || COMMAND+=(--tfds_data_dir="$TFDS_DATA_DIR")
  [[ $ENABLE_FP8 == 0 ]] || COMMAND+=(--gin.train.te_config_cls=@te_helper.TransformerEngineConfig
    --gin.te_helper.TransformerEngineConfig.enabled=1)
  [[ -z ${TRAIN_STEPS:-} ]] || COMMAND+=(--gin.TRAIN_STEPS="$TRAIN_STEPS")
}
