"""Reads records from files of text, jsonl, csv, parquet and arrow, compressed or not.

Only `file_source` uses TensorFlow.
"""

from rosetta_t5.data.reading.bad_examples import BadExample, BadExamples, unwrap_reader_errors
from rosetta_t5.data.reading.blocks import BlockReader, is_in_validation
from rosetta_t5.data.reading.file_formats import Layout, find_files
from rosetta_t5.data.reading.records import read_records
