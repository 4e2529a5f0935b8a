#!/usr/bin/env python3
"""Prints how to get the Pile today."""

import sys

from t5x.contrib.gpu.scripts_gpu.download_the_pile import main

if __name__ == "__main__":
  sys.exit(main())
