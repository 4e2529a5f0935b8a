#!/usr/bin/env python3
"""The Pile's public copies have been gone since 2023, so this script downloads nothing.

Your options:
  1. If you have a copy as it was distributed (train/00.jsonl.zst to train/29.jsonl.zst,
     val.jsonl.zst and test.jsonl.zst), put it or a link into DIR/the_pile and look at it:
       rosetta-t5 inspect the_pile_span_corruption --tfds_data_dir DIR
     Then train with --tfds_data_dir=DIR, or ROSETTA_T5_DATA=DIR. A folder that TensorFlow Datasets
     wrote (DIR/ThePile/1.0.0 or DIR/the_pile/1.0.0) is read as it is.
  2. Train on C4: --gin.MIXTURE_OR_TASK_NAME="'c4_v220_span_corruption'", with the files of
     huggingface.co/datasets/allenai/c4 in DIR/c4/en, or with the output of `tfds build c4/en`.
  3. Train on your own text: docs/data.md, "Your own files"."""

if __name__ == "__main__":
  print(__doc__)
  raise SystemExit(1)
