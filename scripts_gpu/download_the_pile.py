#!/usr/bin/env python3
"""Prints how to get the Pile today, and checks and indexes a local copy.

python scripts_gpu/download_the_pile.py                 print what to do
python scripts_gpu/download_the_pile.py --data_dir DIR  describe a copy: its files and their sizes
"""

import sys

from rosetta_t5.data.download_scripts import check_pile

if __name__ == "__main__":
  sys.exit(check_pile())
