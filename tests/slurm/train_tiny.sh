#!/usr/bin/env bash
# What each process of the job runs in the tests: a tiny model on the CPU; jax finds the others by itself.
set -euo pipefail
exec "$PYTHON" -m t5x.train --gin_file="$GIN_FILE" --gin.MODEL_DIR="'$T5X_WORKSPACE_DIR/$MODEL_DIR'" \
  --gin.RANDOM_SEED=0 --gin.train/utils.DatasetConfig.seed=0 --multiprocess_gpu
