#!/usr/bin/env bash
# Pulls an image and opens a shell in it, with this machine's GPUs, the data sets and a workspace.
#
# usage: docker/interactive_pull_and_launch.sh CONTAINER DATASET_PATH
#
#   CONTAINER       the image
#   DATASET_PATH    the folder of the data sets; the container sees it as /t5x_home/datasets
#
# environment: WORKSPACE_PATH (where runs are written, by default workspace/ where you are; the container sees it
#   as /t5x_home/workspace). The folder that you are in is /t5x_home.
set -euo pipefail
SCRIPTS_DIR=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../scripts_gpu" && pwd)
# shellcheck source=../scripts_gpu/training.sh
source "$SCRIPTS_DIR/training.sh"
help_if_asked "$@"
(($# == 2)) || die "$# arguments are given, but CONTAINER and DATASET_PATH must be" "See $(basename "$0") --help."
[[ -n $1 ]] || die "CONTAINER is empty" "Give the image that docker/build.sh made, or another."
[[ -d $2 ]] || die "DATASET_PATH=$2 is no folder" "It holds the data sets, one folder each (docs/data.md)."
command -v docker >/dev/null || die "docker is not installed here" "docs/install.md has the other ways."
WORKSPACE_PATH=${WORKSPACE_PATH:-$PWD/workspace}

docker pull "$1"
mkdir -p "$WORKSPACE_PATH"
exec docker run -ti --rm --gpus all --net=host --ipc=host \
  -v "$PWD:/t5x_home" -v "$(readlink -f "$2"):/t5x_home/datasets" -v "$(readlink -f "$WORKSPACE_PATH"):/t5x_home/workspace" \
  -w /t5x_home "$1" /bin/bash
