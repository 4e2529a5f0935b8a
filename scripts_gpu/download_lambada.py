#!/usr/bin/env python3
"""Prints where to get LAMBADA, and where the task `lambada` reads it."""

import sys

from t5x.contrib.gpu.scripts_gpu.download_lambada import main

if __name__ == "__main__":
  sys.exit(main())
