#!/usr/bin/env python3
"""Says how to get the Pile today, and checks and indexes a copy that is on this machine.

python scripts_gpu/download_the_pile.py                 what there is to do
python scripts_gpu/download_the_pile.py --data_dir DIR  look at a copy: which files, whole or not, how much
"""

import sys

from rosetta_t5.data.local_files.dataset_copies import check_pile

if __name__ == "__main__":
  sys.exit(check_pile())
