"""Text files as they come: formats, compression, records, what is wrong with them. No TensorFlow."""

from rosetta_t5.data.reading.bad_examples import BadExample, BadExamples, as_raised
from rosetta_t5.data.reading.blocks import BlockReader
from rosetta_t5.data.reading.file_formats import Layout, find_files, format_of
from rosetta_t5.data.reading.records import read_records
