"""The device that a program is compiled for, which need not be one of this machine."""

from __future__ import annotations

from typing import Any

import jax


def target_device() -> Any:
  """Returns a device of the mesh in use (`jax.set_mesh`), or else jax's first device.

  The result has a `platform`, such as "gpu", and a `device_kind`. Code that asks for jax's default
  backend instead is wrong when it traces a GPU program on a machine without a GPU.
  """
  return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
