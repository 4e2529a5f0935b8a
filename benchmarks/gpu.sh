#!/usr/bin/env bash
# Tests the kernels on this GPU, and measures the training step with each of them.
#
#   benchmarks/gpu.sh                                     all rows, results in benchmarks/results/gpu
#   benchmarks/gpu.sh tests attention small base large    these rows, which fit in one call of nine minutes
#   benchmarks/gpu.sh xl fp8-loss hf                      the remaining rows, for another call
#   benchmarks/gpu.sh smoke                               every kind of row at toy size, also on a CPU
#
# A row is measured once. A row with a file NAME.json is skipped. A row that failed has its output in
# NAME.failed and is skipped until that file is deleted. A row that was killed is measured again. Call the
# script until no rows remain. The most important rows of all sizes come first. results.md is rewritten
# after each row.
#
# RESULTS=folder PYTHON=python3 BUDGET_S=540 ROW_S=240 change the defaults (seconds per call and per row).
# PACK=file.tar.gz archives the whole folder after each row, for machines that return few files.
# The script needs jax, flax, optax, orbax, etils and wrapt, but not TensorFlow, seqio or gin. The row `tests`
# needs pytest; the rows `hf` need torch and transformers. The other packages are pure Python and can be
# installed in a folder:
#   pip install --no-deps --target carried clu ml-collections jaxtyping wadler-lindig beartype
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

# The most important kinds come first, so that a call that ends early has measured them for every size.
KINDS=(
  "bf16-xla --kernel xla"
  "bf16-fused --kernel cudnn --fuse-qkv"
  "fp8-cudnn --kernel cudnn --fuse-qkv --fp8"
  "bf16-pack --kernel flash --fuse-qkv --pack"
  "bf16-flash --kernel flash"
  "bf16-cudnn --kernel cudnn"
  "bf16-chunk --kernel cudnn --fuse-qkv --loss-chunk 16"
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

asked() {  # ROW: was this row requested?
  [[ $ASKED == *" $1 "* ]]
}

left() {  # prints the remaining seconds of this call
  echo $((BUDGET_S - SECONDS))
}

tabled() {  # writes the table, and the archive of the folder
  "$PYTHON" -m benchmarks.results_table "$RESULTS" > "$RESULTS/results.new" \
    && mv "$RESULTS/results.new" "$RESULTS/results.md"
  [[ -z ${PACK:-} ]] || tar -czf "$PACK" -C "$RESULTS" .
}

run() {  # NAME COMMAND...: measures a row, unless it is measured, has failed, or no time is left
  local name=$1 limit began=$SECONDS status
  shift
  if [[ -s $RESULTS/$name.json ]]; then
    echo "== $name: already measured"
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

step() {  # NAME ARGUMENTS...: measures a training step
  local name=$1
  shift
  run "$name" "$PYTHON" -m benchmarks.train_step "$@"
}

# The repository's pytest options (type checks, warnings as errors) are meant for its own environment.
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
    # The words must be split.
    # shellcheck disable=SC2086
    asked $size && step "$size-${kind%% *}" --size $size ${WORKLOADS[$size]} ${kind#* }
  done
done
if asked fp8-loss; then
  ROW_S=$BUDGET_S run fp8-loss-small "$PYTHON" -m benchmarks.fp8_comparison --size small --fuse-qkv
  ROW_S=$BUDGET_S run fp8-loss-large "$PYTHON" -m benchmarks.fp8_comparison --size large --batch 64 --fuse-qkv
fi
if asked hf; then
  for of in small:256 base:128 large:64; do
    run "hf-${of%:*}" "$PYTHON" -m benchmarks.hugging_face \
      --size "${of%:*}" --batch "${of#*:}"
  done
fi
if asked smoke; then
  toy=(--size tiny --batch 4 --lengths 32 16 --steps 2)
  step smoke-bf16-xla "${toy[@]}"
  step smoke-fp8 "${toy[@]}" --fp8 --emulate --fuse-qkv --loss-chunk 8
  step smoke-bf16-pack "${toy[@]}" --kernel flash --pack
  run smoke-attention "$PYTHON" -m benchmarks.attention_kernels --batch 1 --heads 1 --repeats 1 \
    --attentions decoder
  run smoke-fp8-loss "$PYTHON" -m benchmarks.fp8_comparison --size tiny --batch 4 --lengths 32 16 \
    --steps 8 --emulate
  if "$PYTHON" -c 'import torch, transformers' 2> /dev/null; then
    run smoke-hf "$PYTHON" -m benchmarks.hugging_face "${toy[@]}" --eager
  fi
fi
tabled
cat "$RESULTS/results.md"
