#!/usr/bin/env python3
"""Says where LAMBADA is, and puts a local file where the task `lambada` finds it.

python scripts_gpu/download_lambada.py                                  what there is to do
python scripts_gpu/download_lambada.py --file lambada_test.jsonl --data_dir DIR
"""

import sys

from rosetta_t5.data.local_files.lambada_copy import main

if __name__ == "__main__":
  sys.exit(main())
