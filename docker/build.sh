#!/usr/bin/env bash
# Builds an image from the Dockerfile of the clone; the build runs the tests.
#
# usage: docker/build.sh NAME [ARGUMENT...]
#
#   NAME        the image's name, such as rosetta-t5 or registry.example/team/rosetta-t5:1
#   ARGUMENT    further arguments of docker build, such as --build-arg TE=1 (adds Transformer Engine)
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
# shellcheck source=../scripts_gpu/training.sh
source scripts_gpu/training.sh
help_if_asked "$@"
[[ -n ${1:-} ]] || die "NAME, the name of the image, is missing" "For example: docker/build.sh rosetta-t5"
[[ $1 != -* ]] || die "the first argument must be the name of the image, got $1" "For example: docker/build.sh rosetta-t5 $1"
command -v docker >/dev/null || die "docker is not installed" "See docs/install.md for other methods."
exec docker build -t "$1" "${@:2}" .
