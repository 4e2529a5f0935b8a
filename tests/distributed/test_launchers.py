"""The environment variables of each launcher give the process's index, count and coordinator."""

from __future__ import annotations

import re

import pytest

from rosetta_t5.distributed.join import LaunchInfo, check_coordinator_address, find_launch_info

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
  ("environment", "info"),
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
    # A shell on a node of an allocation: srun did not start it, so it belongs to no run.
    ({"SLURM_JOB_ID": "100"}, None),
  ],
)
def test_launch_info_is_read_from_the_launchers_environment(environment, info):
  assert find_launch_info(environment) == info


@pytest.mark.parametrize("mpi", [OPEN_MPI, PALS])
def test_pbs_gives_the_nodes_and_its_mpiexec_the_indices(tmp_path, mpi):
  (tmp_path / "nodes").write_text("gpu03\n" * 4 + "gpu04\n" * 4)
  info = find_launch_info(mpi | {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_JOBID": "77.server"})
  assert info is not None
  assert info.launcher.startswith("PBS (")
  assert (info.coordinator, info.count, info.nodes) == ("gpu03:13577", 8, 2)
  assert (info.index, info.local_index) in ((3, 3), (5, 1))


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1", "[::1]"])
def test_a_loopback_coordinator_is_an_error_on_several_nodes(host):
  text = f"--coordinator_address={host}:1234 is a loopback address, which means a different machine on each node, but Slurm"
  with pytest.raises(ValueError, match=re.escape(text)):
    check_coordinator_address(f"{host}:1234", find_launch_info(SLURM))


@pytest.mark.parametrize(
  ("address", "info"),
  [
    ("localhost:1", None),
    ("localhost:1", LaunchInfo("Slurm", nodes=1)),
    ("gpu017:1", LaunchInfo("Slurm", nodes=2)),
    ("10.127.0.1:1", LaunchInfo("Slurm", nodes=2)),
  ],
)
def test_other_coordinator_addresses_are_accepted(address, info):
  check_coordinator_address(address, info)
