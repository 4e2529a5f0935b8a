"""Where LAMBADA is, and putting a copy of it into its place (NVIDIA's script of this name)."""

from rosetta_t5.data.download_scripts import install_lambada as main

if __name__ == "__main__":
  raise SystemExit(main())
