"""Reads examples from files of text, jsonl, csv, parquet and arrow, compressed or not.

Only `file_source` uses TensorFlow.
"""

from rosetta_t5.data.reading.examples import (
  BadExamples,
  BlockReader,
  is_in_validation,
  make_converter,
)
from rosetta_t5.data.reading.files import DEFAULT_OPTIONS, ReadOptions, find_files
from rosetta_t5.data.reading.records import read_records
