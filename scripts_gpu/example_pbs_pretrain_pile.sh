#!/usr/bin/env bash
# Pretrains T5 1.1 on the Pile on the nodes of a PBS cluster, with one process per GPU.
#
# usage: qsub -v MODEL_DIR=NAME,TFDS_DATA_DIR=FOLDER -l select=8:ngpus=8:mpiprocs=8 example_pbs_pretrain_pile.sh
#
#   MODEL_DIR          required: the run's folder, absolute or relative to the folder you submit from
#   TFDS_DATA_DIR      the folder of the datasets
#   T5X_DIR            the clone; default the folder you submit from
#   MPIEXEC            the command that starts the processes; default mpiexec. It must pass on the environment (Open MPI:
#                      MPIEXEC="mpirun -x PBS_NODEFILE -x ..." for each variable that is set)
#   TRAIN_STEPS=500 T5_SIZE=large and all other variables of multiprocess_pretrain_pile.sh
#
# Processes find each other through PBS_NODEFILE and mpiexec's variables. A job that receives SIGTERM saves a
# checkpoint; when it is submitted again, it resumes from there.
#PBS -N t5x_train
#PBS -j oe
#PBS -r y
set -euo pipefail
cd "${PBS_O_WORKDIR:-$PWD}"
SCRIPTS_DIR=${SCRIPTS_DIR:-${T5X_DIR:-$PWD}/scripts_gpu}
[[ -f $SCRIPTS_DIR/training.sh ]] || SCRIPTS_DIR=$(dirname "$(readlink -f "$0")")
# shellcheck source=training.sh
source "$SCRIPTS_DIR/training.sh"
help_if_asked "$@"

[[ -n ${PBS_NODEFILE:-} ]] || die "this script must be submitted with qsub" "For example: qsub -v MODEL_DIR=my_run -l select=2:ngpus=8:mpiprocs=8 $0"
[[ -n ${MODEL_DIR:-} ]] || die "MODEL_DIR is not set" "Set the run's folder with qsub -v MODEL_DIR=NAME,..."
read -r -a mpiexec <<<"${MPIEXEC:-mpiexec}"
command -v "${mpiexec[0]}" >/dev/null || die "command ${mpiexec[0]} does not exist" "Load its module, or set MPIEXEC."
export MODEL_DIR WITH_MP=1 T5X_WORKSPACE_DIR=$PWD TRAIN_STEPS=${TRAIN_STEPS:-500} PBS_NODEFILE
exec "${mpiexec[@]}" -n "$(grep -c . "$PBS_NODEFILE")" bash "$SCRIPTS_DIR/multiprocess_pretrain_pile.sh"
