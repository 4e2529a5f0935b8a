"""Launchers' environments, as they set them."""

from __future__ import annotations

import re

import pytest

from rosetta_t5.distributed.launchers import LaunchInfo, check_coordinator, find_launch_info

SLURM = {
  "SLURM_JOB_ID": "100",
  "SLURM_STEP_ID": "2",
  "SLURM_PROCID": "9",
  "SLURM_LOCALID": "1",
  "SLURM_NTASKS": "16",
  "SLURM_NNODES": "2",
  "SLURM_JOB_NODELIST": "gpu[017-018],login1",
}
OPEN_MPI = {
  "OMPI_COMM_WORLD_RANK": "3",
  "OMPI_COMM_WORLD_SIZE": "8",
  "OMPI_COMM_WORLD_LOCAL_RANK": "3",
  "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
URI = {"OMPI_MCA_orte_hnp_uri": "1234567.0;tcp://10.0.0.3,10.1.0.3:34911"}
PALS = {"PALS_RANKID": "5", "PMI_RANK": "5", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1"}


@pytest.mark.parametrize(
  ("environment", "place"),
  [
    ({}, None),
    (SLURM, LaunchInfo("Slurm", "gpu017:13947", 16, 9, 1, 2)),
    (
      SLURM | {"SLURM_JOB_NODELIST": "node0", "SLURM_NNODES": "1", "SLURM_STEP_ID": "0"},
      LaunchInfo("Slurm", "node0:13945", 16, 9, 1, 1),
    ),
    (OPEN_MPI, LaunchInfo("Open MPI", None, 8, 3, 3, 2)),
    (OPEN_MPI | URI, LaunchInfo("Open MPI", "10.0.0.3:25417", 8, 3, 3, 2)),
    (
      {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "4"},
      LaunchInfo("Kubernetes", index=4),
    ),
    # A shell on a node of an allocation, not started by srun: no process of a run.
    ({"SLURM_JOB_ID": "100"}, None),
  ],
)
def test_a_launchers_environment_says_which_process_this_is(environment, place):
  assert find_launch_info(environment) == place


@pytest.mark.parametrize("mpi", [OPEN_MPI, PALS])
def test_pbs_lists_the_nodes_and_its_mpiexec_numbers_the_processes(tmp_path, mpi):
  (tmp_path / "nodes").write_text("gpu03\n" * 4 + "gpu04\n" * 4)
  place = find_launch_info(
    mpi | {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_JOBID": "77.server"}
  )
  assert place is not None
  assert place.launcher.startswith("PBS (")
  assert (place.coordinator, place.count, place.nodes) == ("gpu03:13577", 8, 2)
  assert (place.index, place.local_index) in ((3, 3), (5, 1))


def test_a_list_of_nodes_that_the_process_cannot_read_is_named():
  with pytest.raises(ValueError, match=r"PBS_NODEFILE=/none cannot be read \(No such file"):
    find_launch_info(OPEN_MPI | {"PBS_NODEFILE": "/none"})


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1", "[::1]"])
def test_an_address_that_means_every_node_itself_is_refused_on_several_nodes(host):
  text = f"--coordinator_address={host}:1234 means, on each node, that node itself, but Slurm has started"
  with pytest.raises(ValueError, match=re.escape(text)):
    check_coordinator(f"{host}:1234", find_launch_info(SLURM))


@pytest.mark.parametrize(
  ("address", "place"),
  [
    ("localhost:1", None),
    ("localhost:1", LaunchInfo("Slurm", nodes=1)),
    ("gpu017:1", LaunchInfo("Slurm", nodes=2)),
    ("10.127.0.1:1", LaunchInfo("Slurm", nodes=2)),
  ],
)
def test_other_addresses_are_taken(address, place):
  check_coordinator(address, place)
