# shellcheck shell=bash
# What the scripts beside this file share: their checks, and the training command they end in. To be sourced.

die() {
  printf 'error: %s\n' "$1" >&2
  shift
  (($# == 0)) || printf '  %s\n' "$@" >&2
  exit 2
}

note() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }

# Prints the comment that the script begins with, where -h or --help is asked for.
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
  die "$name is '$value', but must be one of: $*" "See $(basename "$0") --help."
}

# check_number NAME VALUE MINIMUM
check_number() {
  # A leading zero would be read as octal, and more digits than these overflow.
  [[ $2 =~ ^(0|[1-9][0-9]{0,8})$ ]] && (($2 >= $3)) && return
  die "$1 is '$2', but must be a whole number, at least $3" "See $(basename "$0") --help."
}

# Sets PYTHON to one that has the package: what is given, the clone's own, or the one on PATH.
find_python() {
  local beside=${SCRIPTS_DIR}/../.venv/bin/python
  if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ ! -x $beside ]] || PYTHON=$beside
  fi
  # A folder with another t5x in it is of no use; rosetta_t5 is what runs.
  "$PYTHON" -c 'import rosetta_t5' 2>/dev/null ||
    die "$PYTHON has no rosetta_t5" "Install it ('make setup' in the clone, or 'pip install .'), or set PYTHON."
}

count_gpus() {
  case ${CUDA_VISIBLE_DEVICES-all} in
    all)
      if command -v nvidia-smi >/dev/null; then nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true; else echo 0; fi
      ;;
    # How they are hidden: by nothing, by a number that none has, by Slurm.
    '' | -1* | NoDevFiles) echo 0 ;;
    *) awk -F, '{ print NF }' <<<"$CUDA_VISIBLE_DEVICES" ;;
  esac
}

# use_gpus COUNT: exactly these many; where there is none, so many devices on the CPU.
use_gpus() {
  local there
  there=$(count_gpus)
  if ((there == 0)); then
    (($1 <= 64)) || die "NUM_GPUS is $1, but there is no GPU here, and the CPU stands in as at most 64 devices"
    note "no GPU here: the CPU stands in, as $1 device(s)"
    export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu} JAX_NUM_CPU_DEVICES=${JAX_NUM_CPU_DEVICES:-$1}
    return
  fi
  (($1 <= there)) ||
    die "NUM_GPUS is $1, but this machine shows $there GPU(s)" "Give at most $there, or change CUDA_VISIBLE_DEVICES."
  CUDA_VISIBLE_DEVICES=$(cut -d, -f"1-$1" <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((there - 1)))}")
  export CUDA_VISIBLE_DEVICES
}

check_model() {
  check_choice T5_SIZE "$T5_SIZE" tiny small base large xl xxl
  [[ $PREC != float16 ]] ||
    die "PREC is float16, in which T5's activations overflow" "Use bfloat16, which has float32's range, or float32."
  check_choice PREC "$PREC" float32 bfloat16
  check_number NUM_MICROBATCHES "$NUM_MICROBATCHES" 0
  check_choice TRANSPOSE_BS "$TRANSPOSE_BS" 0 1
  check_choice FUSE_QKV "$FUSE_QKV" 0 1
  check_choice PACK "$PACK" 0 1
  [[ -z $ENABLE_FP8 ]] || check_choice ENABLE_FP8 "$ENABLE_FP8" 0 1
  # FP8 multiplies what is kept in bfloat16. Left alone it is on where the GPU has it.
  if [[ ${ENABLE_FP8:-1} == 1 && $PREC != bfloat16 ]]; then
    note "FP8 needs PREC=bfloat16, which is used; ENABLE_FP8=0 keeps $PREC"
    PREC=bfloat16
  fi
}

check_gpt_size() {
  check_choice GPT_SIZE "$GPT_SIZE" tiny 126m 1_7b 3_6b 5b 7_5b 18_4b 39_1b 76_1b 145_6b 175b 310_1b
}

check_data() {
  : "${TFDS_DATA_DIR:=}"
  [[ -n $TFDS_DATA_DIR || ! -d /t5x_home/datasets ]] || TFDS_DATA_DIR=/t5x_home/datasets
  [[ -z $TFDS_DATA_DIR || -d $TFDS_DATA_DIR ]] ||
    die "TFDS_DATA_DIR=$TFDS_DATA_DIR is no folder" "It holds the data sets, one folder each (docs/data.md)."
}

# check_vocabulary PATH
check_vocabulary() {
  [[ -f $1 ]] || die "VOCAB_PATH=$1 is no file" "It is a SentencePiece model, such as c4_en_301_5Mexp2_spm.model."
}

# place_model_dir FOLDER: MODEL_DIR lies under it, unless it is absolute or in a store such as gs://. Checks that
# it can be written.
place_model_dir() {
  [[ $MODEL_DIR != *://* ]] || return 0
  [[ $MODEL_DIR == /* ]] || MODEL_DIR=$1/$MODEL_DIR
  local there=$MODEL_DIR
  while [[ ! -e $there ]]; do there=$(dirname "$there"); done
  [[ -d $there && -w $there ]] ||
    die "MODEL_DIR=$MODEL_DIR cannot be written: $there is no folder that you may write in" "Give another MODEL_DIR."
}

# make_log_dir FOLDER
make_log_dir() {
  { mkdir -p "$1" && [[ -w $1 ]]; } 2>/dev/null ||
    die "LOG_DIR=$1 cannot be made, or not be written" "Give a folder that you may write in."
}

# last_checkpoint FOLDER: the name of its last whole checkpoint; nothing where there is none.
last_checkpoint() {
  [[ -d $1 ]] || return 0
  find "$1" -maxdepth 1 -name 'checkpoint_*' -printf '%f\n' |
    { grep -E '^checkpoint_[0-9]+$' || true; } | sort -t_ -k2 -n | tail -1
}

# check_checkpoint FOLDER: one that MAKE_FT_DIR can copy from.
check_checkpoint() {
  [[ -d $1 ]] || die "MAKE_FT_DIR=true, but there is no folder $1"
  [[ -n $(last_checkpoint "$1") ]] || die "MAKE_FT_DIR=true, but $1 has no checkpoint to copy"
}

# copy_last_checkpoint FROM TO: a whole copy, or none; one that is there already is kept.
copy_last_checkpoint() {
  [[ ! -d $2 ]] || return 0
  check_checkpoint "$1"
  local last
  last=$(last_checkpoint "$1")
  mkdir -p "$2.part" # one may be left of a copy that was cut off
  cp -r "$1/$last" "$2.part/"
  mv "$2.part" "$2"
  note "$1/$last is copied to $2, where finetuning goes on"
}

# check_start DEVICES: that COMMAND can begin on so many devices: its gin files, its checkpoint, and FT_TASK's data.
check_start() {
  local task=glue_mnli_v2
  [[ $FT_TASK == mnli2 ]] || task=squad_v010_allanswers
  note "checks the configuration, the checkpoint and $task, before anything is copied"
  "${COMMAND[@]}" --devices="$1" --dry_run >/dev/null || die "the finetuning could not begin (see above): nothing is copied"
  # Another task's data is not known here.
  [[ ${COMMAND[*]} == *MIXTURE_OR_TASK* ]] || "$PYTHON" -u -m rosetta_t5.cli inspect "$task" --batches=1 --examples=0 \
    --module=t5x.contrib.gpu.scripts_gpu.seqio_tasks ${TFDS_DATA_DIR:+--tfds_data_dir="$TFDS_DATA_DIR"} >/dev/null ||
    (($? == 1)) || die "the data of $task cannot be read (see above): nothing is copied"
}

# choose_finetuning_folder DEVICES: COMMAND's MODEL_DIR stays, or with MAKE_FT_DIR=true becomes a new folder that
# begins with its last checkpoint. That is made when all else is known to be right.
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
      "Pretrain there first, or name one: TRAIN_ARGS=--gin.INITIAL_CHECKPOINT_PATH=\"'/runs/large'\", a folder of checkpoint_STEP folders."
  fi
}

# Sets COMMAND, from GIN_FILE, BSIZE and the variables that the scripts are given.
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
  # Not given, it is left to what the GPUs can do; given, it is meant, and fails where it cannot be.
  [[ -z $ENABLE_FP8 ]] || COMMAND+=(--gin.te_helper.TransformerEngineConfig.enabled="$ENABLE_FP8")
  [[ -z ${TFDS_DATA_DIR:-} ]] || COMMAND+=(--tfds_data_dir="$TFDS_DATA_DIR")
}

# The user's own flags, which win: they come last.
add_train_args() {
  local more
  read -r -a more <<<"${TRAIN_ARGS:-}"
  COMMAND+=("${more[@]}")
}

# The flags for this machine and size, and after them the user's own, which win.
set_xla_flags() {
  XLA_FLAGS=$("$PYTHON" -m rosetta_t5.parallel.xla_flags "${SCRIPTS_DIR}/xla_flags/$1.txt")
  export XLA_FLAGS
}

# Sets what a GPT script's environment leaves open, and checks it.
check_gpt() {
  : "${GPT_SIZE:=126m}" "${ENABLE_FP8:=0}" "${TRANSPOSE_BS:=0}" "${FUSE_QKV:=1}" "${PACK:=1}" "${NUM_MICROBATCHES:=0}"
  check_choice PREC "$PREC" float32 bfloat16
  check_gpt_size
  local switch
  for switch in ENABLE_FP8 TRANSPOSE_BS FUSE_QKV PACK; do check_choice "$switch" "${!switch}" 0 1; done
  check_number NUM_MICROBATCHES "$NUM_MICROBATCHES" 0
  [[ -z ${TRAIN_STEPS:-} ]] || check_number TRAIN_STEPS "$TRAIN_STEPS" 1
}

# gpt_command LOGDIR BATCH: COMMAND pretrains GPT on the Pile as GPT_SIZE, PREC, the switches, VOCAB_PATH,
# TFDS_DATA_DIR and TRAIN_STEPS say.
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
