#!/usr/bin/env python3
"""OpenAI's cleaned test set of LAMBADA is a file of 5153 lines {"text": …}:
  https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl
  https://huggingface.co/datasets/EleutherAI/lambada_openai
This script downloads nothing. Put the file at DIR/lambada/lambada_test.jsonl, and evaluate the task
'lambada' with --tfds_data_dir=DIR, or ROSETTA_T5_DATA=DIR."""

if __name__ == "__main__":
  print(__doc__)
  raise SystemExit(1)
