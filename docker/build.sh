#!/usr/bin/env bash
# Builds the image of the Dockerfile at the top of the clone; the build runs the tests.
#
# usage: docker/build.sh NAME [ARGUMENT...]
#
#   NAME        the image's name, such as rosetta-t5 or registry.example/team/rosetta-t5:1
#   ARGUMENT    more for docker build, such as --build-arg TE=1 (Transformer Engine too)
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
# shellcheck source=../scripts_gpu/training.sh
source scripts_gpu/training.sh
help_if_asked "$@"
[[ -n ${1:-} ]] || die "the image's name is not given" "For example: docker/build.sh rosetta-t5"
[[ $1 != -* ]] || die "the image's name comes first, not $1" "For example: docker/build.sh rosetta-t5 $1"
command -v docker >/dev/null || die "docker is not installed here" "docs/install.md has the other ways."
exec docker build -t "$1" "${@:2}" .
