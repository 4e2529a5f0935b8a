"""What became of the Pile, and a look at a copy of it (NVIDIA's script of this name)."""

from rosetta_t5.data.download_scripts import check_pile as main

if __name__ == "__main__":
  raise SystemExit(main())
