"""TensorFlow is imported only when it is needed, and sees no GPU."""

from __future__ import annotations

import subprocess
import sys

from rosetta_t5.data.tensorflow_setup.tensorflow_import import (
  import_in_background,
  import_seqio,
  import_tensorflow,
)


def test_importing_the_data_package_imports_no_tensorflow() -> None:
  code = "import rosetta_t5.data, sys; print({'tensorflow', 'seqio', 'gin'} & set(sys.modules))"
  result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert result.stdout.strip() == "set()"


def test_tensorflow_sees_no_gpu() -> None:
  assert import_tensorflow().config.get_visible_devices("GPU") == []


def test_the_background_thread_imports_seqio() -> None:
  import_in_background().join()
  assert import_seqio() is sys.modules["seqio"]
