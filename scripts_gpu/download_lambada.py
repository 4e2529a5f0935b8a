#!/usr/bin/env python3
"""Prints where to get LAMBADA, and copies a local file to the folder that the task `lambada` reads.

python scripts_gpu/download_lambada.py                                  print where to get the file
python scripts_gpu/download_lambada.py --file lambada_test.jsonl --data_dir DIR
"""

import sys

from rosetta_t5.data.download_scripts import install_lambada

if __name__ == "__main__":
  sys.exit(install_lambada())
