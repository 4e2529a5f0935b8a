#!/usr/bin/env bash
# Pulls an image and opens a shell in it, with this machine's GPUs, the datasets and a workspace.
#
# usage: docker/interactive_pull_and_launch.sh CONTAINER DATASET_PATH
#
#   CONTAINER       the image
#   DATASET_PATH    the folder of the datasets, mounted at /t5x_home/datasets
#
# environment: WORKSPACE_PATH (the folder of the runs, mounted at /t5x_home/workspace; by default workspace/ in the
#   current folder). The current folder is mounted at /t5x_home.
set -euo pipefail
SCRIPTS_DIR=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../scripts_gpu" && pwd)
# shellcheck source=../scripts_gpu/training.sh
source "$SCRIPTS_DIR/training.sh"
help_if_asked "$@"
(($# == 2)) || die "expected 2 arguments, CONTAINER and DATASET_PATH, got $#" "See $(basename "$0") --help."
[[ -n $1 ]] || die "CONTAINER is empty" "Give the image that docker/build.sh built, or another one."
[[ -d $2 ]] || die "DATASET_PATH=$2 is not a folder" "It must contain one folder for each dataset (docs/data.md)."
command -v docker >/dev/null || die "docker is not installed" "See docs/install.md for other methods."
WORKSPACE_PATH=${WORKSPACE_PATH:-$PWD/workspace}

docker pull "$1"
mkdir -p "$WORKSPACE_PATH"
exec docker run -ti --rm --gpus all --net=host --ipc=host \
  -v "$PWD:/t5x_home" -v "$(readlink -f "$2"):/t5x_home/datasets" -v "$(readlink -f "$WORKSPACE_PATH"):/t5x_home/workspace" \
  -w /t5x_home "$1" /bin/bash
