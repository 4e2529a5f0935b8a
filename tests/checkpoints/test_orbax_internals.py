"""The private name of Orbax that formats/orbax_internals.py uses is where it expects it."""

from __future__ import annotations

import jax
import orbax.checkpoint as ocp

from rosetta_t5.checkpoints.arrays import checksums
from rosetta_t5.checkpoints.formats.orbax_internals import writing_checksums

ADVICE = f"""
Orbax {ocp.__version__} no longer writes arrays through the function that
rosetta_t5/checkpoints/formats/orbax_internals.py replaces, or calls it with other arguments. Find the
function that receives the copies of the arrays on the host (`ReplicaSlices`), and replace that one. Until
then, lower the upper bound of orbax-checkpoint in setup.cfg.
"""


def test_a_save_within_the_context_writes_checksums(tmp_path):
  with writing_checksums():
    ocp.PyTreeCheckpointer().save(tmp_path / "state", {"a": {"b": jax.numpy.arange(8.0)}})
  found = checksums.read(tmp_path / "state", with_run_facts=True)
  assert found is not None, ADVICE
  assert found["a/b"].blocks == {"0": checksums.checksum(jax.numpy.arange(8.0).__array__())}, ADVICE
