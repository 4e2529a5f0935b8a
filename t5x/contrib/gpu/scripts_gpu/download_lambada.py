"""Where LAMBADA is, and putting a copy of it into its place (NVIDIA's script of this name)."""

from rosetta_t5.data.local_files.dataset_copies import install_lambada

if __name__ == "__main__":
  raise SystemExit(install_lambada())
