#!/usr/bin/env bash
# What a GPU is asked first: are the kernels right here, how fast is a step, by which of them.
#
#   benchmarks/gpu.sh                      all rows, results in benchmarks/results/gpu
#   benchmarks/gpu.sh small base large     the rows of these sizes, one call of nine minutes
#   benchmarks/gpu.sh xl fp8-loss hf       the rest, another call
#   benchmarks/gpu.sh smoke                every kind of row at toy size, also on a CPU
#
# RESULTS=folder PYTHON=python3 BUDGET_S=540 change the defaults. A row that has its JSON file is not
# measured again; a row that fails leaves NAME.log. After each row results.md is written anew. It needs
# jax, flax, optax and orbax, and neither TensorFlow nor seqio; torch and transformers for the rows hf.
# What else is missing there is pure Python and can be carried along in a folder `carried`:
#   pip install --no-deps --target carried clu ml-collections jaxtyping wadler-lindig gin-config
set -u
cd "$(dirname "$0")/.." || exit
PYTHON=${PYTHON:-python3}
RESULTS=${RESULTS:-benchmarks/results/gpu}
BUDGET_S=${BUDGET_S:-540}
SIZES=("$@")
[[ $# -gt 0 ]] || SIZES=(tests attention small base large xl fp8-loss hf)
mkdir -p "$RESULTS"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}:$PWD/carried
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-/tmp/rosetta_t5_xla_cache}
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.9}
STARTED=$SECONDS

run() {  # NAME COMMAND...: one row, unless it is there or the time is up
  local name=$1
  shift
  if [[ -s $RESULTS/$name.json ]]; then
    echo "== $name: there already"
    return
  fi
  if ((SECONDS - STARTED > BUDGET_S - 60)); then
    echo "== $name: no time left; call again"
    return
  fi
  echo "== $name"
  timeout $((BUDGET_S - SECONDS + STARTED)) "$@" --json "$RESULTS/$name.json" \
    > "$RESULTS/$name.log" 2>&1 || echo "   failed: $RESULTS/$name.log"
  tail -n 2 "$RESULTS/$name.log"
  "$PYTHON" -m benchmarks.results_table "$RESULTS" > "$RESULTS/results.md"
}

step() {  # NAME ARGUMENTS...: a training step
  local name=$1
  shift
  run "$name" "$PYTHON" -m benchmarks.train_step "$@"
}

rows() {  # SIZE BATCH MORE...: what is measured of one size
  local size=$1 batch=$2
  shift 2
  local common=(--size "$size" --batch "$batch" "$@")
  step "$size-bf16-xla" "${common[@]}" --kernel xla
  step "$size-bf16-cudnn" "${common[@]}" --kernel cudnn
  step "$size-bf16-flash" "${common[@]}" --kernel flash
  step "$size-bf16-fused" "${common[@]}" --kernel cudnn --fuse-qkv --transpose
  step "$size-bf16-chunk" "${common[@]}" --kernel cudnn --fuse-qkv --loss-chunk 16
  step "$size-bf16-pack" "${common[@]}" --kernel flash --fuse-qkv --pack
  step "$size-fp8-cudnn" "${common[@]}" --kernel cudnn --fuse-qkv --fp8
  step "$size-fp8-delayed" "${common[@]}" --kernel cudnn --fuse-qkv --fp8 --recipe delayed
}

for size in "${SIZES[@]}"; do
  case $size in
    tests)
      echo "== tests"
      "$PYTHON" -m pytest -q -m gpu tests/test_on_gpu.py -p no:cacheprovider 2>&1 \
        | tee "$RESULTS/tests.log" | tail -n 15
      ;;
    attention)
      run attention "$PYTHON" -m benchmarks.attention_kernels
      run attention-pack "$PYTHON" -m benchmarks.attention_kernels --pack
      ;;
    small) rows small 256 ;;
    base) rows base 128 ;;
    large) rows large 64 ;;
    xl) rows xl 24 --steps 20 --remat minimal ;;
    fp8-loss)
      run fp8-loss-small "$PYTHON" -m rosetta_t5.cli bench fp8 --size small --fuse-qkv
      run fp8-loss-large "$PYTHON" -m rosetta_t5.cli bench fp8 --size large --batch 64 --fuse-qkv
      ;;
    hf)
      for of in small:256 base:128 large:64; do
        run "hf-${of%:*}" "$PYTHON" -m rosetta_t5.cli bench hugging-face \
          --size "${of%:*}" --batch "${of#*:}"
      done
      ;;
    smoke)
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
      ;;
    *)
      echo "unknown row '$size': tests attention small base large xl fp8-loss hf smoke" >&2
      exit 2
      ;;
  esac
done
"$PYTHON" -m benchmarks.results_table "$RESULTS" | tee "$RESULTS/results.md"
