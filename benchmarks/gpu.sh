#!/usr/bin/env bash
# What a GPU is asked first: are the kernels right here, how fast is a step, by which of them.
#
#   benchmarks/gpu.sh                                all rows, results in benchmarks/results/gpu
#   benchmarks/gpu.sh tests attention small base large    these rows, meant for one nine-minute call
#   benchmarks/gpu.sh xl fp8-loss hf                 the rest, another call
#   benchmarks/gpu.sh smoke                          every kind of row at toy size, also on a CPU
#
# A row is measured once: one that has NAME.json is not measured again, one that failed has its output
# in NAME.failed and is left alone until that file is deleted, one that was killed begins anew. Call
# again until nothing is left. Of several sizes the rows that matter most come first. After each row
# results.md is written anew.
#
# RESULTS=folder PYTHON=python3 BUDGET_S=540 ROW_S=240 change the defaults (seconds of a call and of a
# row); PACK=file.tar.gz gets the whole folder after each row, for machines that give few files back.
# It needs jax, flax, optax, orbax, etils and wrapt, and neither TensorFlow nor seqio; pytest for the row
# tests; torch and transformers for the rows hf. The rest is pure Python and can be carried along:
#   pip install --no-deps --target carried clu ml-collections jaxtyping wadler-lindig gin-config beartype
set -u
cd "$(dirname "$0")/.." || exit
PYTHON=${PYTHON:-python3}
RESULTS=${RESULTS:-benchmarks/results/gpu}
BUDGET_S=${BUDGET_S:-540}
ROW_S=${ROW_S:-240}
ALL=(tests attention small base large xl fp8-loss hf)
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}:$PWD/carried
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-/tmp/rosetta_t5_xla_cache}
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.9}

# The most telling first: a call that ends early has those of every size.
KINDS=(
  "bf16-xla --kernel xla"
  "bf16-fused --kernel cudnn --fuse-qkv --transpose"
  "fp8-cudnn --kernel cudnn --fuse-qkv --fp8"
  "bf16-pack --kernel flash --fuse-qkv --pack"
  "bf16-flash --kernel flash"
  "bf16-cudnn --kernel cudnn"
  "bf16-chunk --kernel cudnn --fuse-qkv --loss-chunk 16"
  "fp8-delayed --kernel cudnn --fuse-qkv --fp8 --recipe delayed"
)
declare -A WORKLOADS=(
  [small]="--batch 256" [base]="--batch 128" [large]="--batch 64" [xl]="--batch 24 --steps 20 --remat minimal"
)

ASKED=" ${*:-${ALL[*]}} "
for row in $ASKED; do
  if [[ " ${ALL[*]} smoke " != *" $row "* ]]; then
    echo "unknown row '$row': ${ALL[*]} smoke" >&2
    exit 2
  fi
done
mkdir -p "$RESULTS" || exit

asked() {  # ROW: is it one of those asked for?
  [[ $ASKED == *" $1 "* ]]
}

left() {  # seconds of this call
  echo $((BUDGET_S - SECONDS))
}

tabled() {  # the table as it stands, and all of it in one file
  "$PYTHON" -m benchmarks.results_table "$RESULTS" > "$RESULTS/results.new" \
    && mv "$RESULTS/results.new" "$RESULTS/results.md"
  [[ -z ${PACK:-} ]] || tar -czf "$PACK" -C "$RESULTS" .
}

run() {  # NAME COMMAND...: one row, unless it is there, has failed, or the time is up
  local name=$1 limit began=$SECONDS status
  shift
  if [[ -s $RESULTS/$name.json ]]; then
    echo "== $name: there already"
    return
  elif [[ -e $RESULTS/$name.failed ]]; then
    echo "== $name: failed before; delete $RESULTS/$name.failed to try again"
    return
  elif (($(left) < 60)); then
    echo "== $name: no time left; call again"
    return
  fi
  echo "== $name"
  limit=$(($(left) < ROW_S ? $(left) : ROW_S))
  timeout -k 10 "$limit" "$@" --json "$RESULTS/$name.json" > "$RESULTS/$name.log" 2>&1
  status=$?
  tail -n 2 "$RESULTS/$name.log"
  if ((status == 124 && limit < ROW_S)); then
    echo "   no time left; call again"
  elif ((status)); then
    mv "$RESULTS/$name.log" "$RESULTS/$name.failed"
    echo "   failed with status $status: $RESULTS/$name.failed"
  fi
  echo "   $((SECONDS - began)) s"
  tabled
}

step() {  # NAME ARGUMENTS...: a training step
  local name=$1
  shift
  run "$name" "$PYTHON" -m benchmarks.train_step "$@"
}

# The repository's own pytest options (types checked, warnings are errors) are for its own environment.
if asked tests; then
  echo "== tests"
  timeout -k 10 "$(left)" "$PYTHON" -m pytest -q -m gpu tests/test_on_gpu.py -p no:cacheprovider \
    -o addopts="-ra --import-mode=importlib" -o filterwarnings=default 2>&1 \
    | tee "$RESULTS/tests.log" | tail -n 15
  tabled
fi
if asked attention; then
  run attention "$PYTHON" -m benchmarks.attention_kernels
  run attention-pack "$PYTHON" -m benchmarks.attention_kernels --pack
fi
for kind in "${KINDS[@]}"; do
  for size in small base large xl; do
    # Words are meant to be split.
    # shellcheck disable=SC2086
    asked $size && step "$size-${kind%% *}" --size $size ${WORKLOADS[$size]} ${kind#* }
  done
done
if asked fp8-loss; then
  ROW_S=$BUDGET_S run fp8-loss-small "$PYTHON" -m rosetta_t5.cli bench fp8 --size small --fuse-qkv
  ROW_S=$BUDGET_S run fp8-loss-large "$PYTHON" -m rosetta_t5.cli bench fp8 --size large --batch 64 --fuse-qkv
fi
if asked hf; then
  for of in small:256 base:128 large:64; do
    run "hf-${of%:*}" "$PYTHON" -m rosetta_t5.cli bench hugging-face \
      --size "${of%:*}" --batch "${of#*:}"
  done
fi
if asked smoke; then
  toy=(--size tiny --batch 4 --lengths 32 16 --steps 2 --group 1 --warmup 1)
  step smoke-bf16-xla "${toy[@]}"
  step smoke-fp8 "${toy[@]}" --fp8 --emulate --fuse-qkv --transpose --loss-chunk 8
  step smoke-bf16-pack "${toy[@]}" --kernel flash --pack
  run smoke-attention "$PYTHON" -m benchmarks.attention_kernels --batch 1 --heads 1 --repeats 1 \
    --places decoder
  run smoke-fp8-loss "$PYTHON" -m rosetta_t5.cli bench fp8 --size tiny --batch 4 --lengths 32 16 \
    --steps 8 --emulate
  if "$PYTHON" -c 'import torch, transformers' 2> /dev/null; then
    run smoke-hf "$PYTHON" -m rosetta_t5.cli bench hugging-face "${toy[@]}" --eager
  fi
fi
tabled
cat "$RESULTS/results.md"
